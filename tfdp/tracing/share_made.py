"""Which of the values that a step stores are made of a replica's share of the loss.

The loss that a step differentiates is the replica's share, a part of a sum. So are its
gradients, and what is made of either is no mean over rows. Gradients that a program
only adds up are parts of a sum in the end as well, and are kept as such.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tfdp._private.names import own_copy
from tfdp.tracing.assigned_terms import term_added_to
from tfdp.tracing.loss_shares import goes_into, key_of
from tfdp.tracing.replica_invariance import is_exchanged, outermost
from tfdp.tracing.run import ReplicaRun, trace_of

__all__ = ["made_of_shares"]


def made_of_shares(run: ReplicaRun) -> tuple[list[Any], list[Any]]:
    """Variables in which a replica stored what is made of its share of the loss.

    Args:
      run: whose replicas are traced. They do alike, so one of them is asked.

    Returns:
      Those of which the mean is brought together; and those that are only added to, by
      values that they do not go into, which stay parts of a sum.
    """
    rank = next((rank for rank, _, _ in run.stored), 0)
    shares = run.shares.get(trace_of(rank))
    if not shares:
        return [], []
    stored = [
        (variable, outermost(own_copy(variable, rank).handle), value)
        for by, variable, value in run.stored
        if by == rank and id(variable) not in run.own_sums
    ]
    added = [term_added_to(handle, value) for _, handle, value in stored]
    terms = [
        value if term is None else term
        for (_, _, value), term in zip(stored, added, strict=True)
    ]
    ways = _Ways(terms)
    of_shares = ways.from_those(shares.is_factor)
    mixed: list[Any] = []
    sums: list[Any] = []
    for (variable, handle, _), term, own in zip(stored, terms, added, strict=True):
        if _key(term) in of_shares:
            is_sum = own is not None and key_of(handle) not in ways.outside
            (sums if is_sum else mixed).append(variable)
    return mixed, sums


class _Ways:
    """All that some values are made of, by no exchange, with the ways between.

    One walk for all values: of gradients each is made of the whole forward pass.
    """

    def __init__(self, values: Iterable[tf.Tensor]) -> None:
        #: By the key of a tensor: the keys of what is made of it.
        self._made_of_it: dict[Any, set[Any]] = collections.defaultdict(set)
        self._tensors: dict[Any, tf.Tensor] = {}
        #: The keys of variables' handles, and of other tensors outside of graphs.
        self.outside: set[Any] = set()
        todo = collections.deque((value, None) for value in values)
        while todo:
            inner, consumer = todo.popleft()
            tensor = outermost(inner)
            if tensor is None:
                continue
            key = key_of(tensor)
            if isinstance(tensor, tf.__internal__.EagerTensor):
                self.outside.add(key)
                continue
            if is_exchanged(tensor):
                continue
            if consumer is not None:
                self._made_of_it[key].add(consumer)
            if key not in self._tensors:
                self._tensors[key] = tensor
                todo.extend((before, key) for before in goes_into(tensor))

    def from_those(self, is_found: Callable[[tf.Tensor], bool]) -> set[Any]:
        """The keys of all that is made of a tensor which `is_found`."""
        todo = [key for key, tensor in self._tensors.items() if is_found(tensor)]
        found = set()
        while todo:
            key = todo.pop()
            if key not in found:
                found.add(key)
                todo += self._made_of_it[key]
        return found


def _key(value: tf.Tensor) -> Any:
    tensor = outermost(value)
    return None if tensor is None else key_of(tensor)
