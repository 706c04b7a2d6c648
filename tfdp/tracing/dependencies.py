"""What many values are made of, and what is made of that, by one walk for all."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdp._private.names import own_copy
from tfdp.tracing.assigned_terms import term_added_to
from tfdp.tracing.loss_shares import goes_into, key_of
from tfdp.tracing.replica_invariance import (
    GATHERED_ROWS,
    OWN_ROWS,
    is_exchanged,
    is_named,
    outermost,
)
from tfdp.tracing.run import ReplicaRun, trace_of


class Dependencies:
    """All that some values are made of, with the ways between.

    One walk for all values: of gradients each is made of the whole forward pass.

    Args:
      values: of graphs.
      is_end: what the walk goes to, and not beyond.
      is_argument: an argument of a graph that is looked for.
    """

    def __init__(
        self,
        values: Iterable[tf.Tensor],
        is_end: Callable[[tf.Tensor], bool] = is_exchanged,
        is_argument: Callable[[tf.Tensor], bool] = lambda tensor: False,
    ) -> None:
        self._is_argument = is_argument
        #: By the key of a tensor: the keys of what is made of it.
        self._made_of_it: dict[Any, set[Any]] = collections.defaultdict(set)
        self._tensors: dict[Any, tf.Tensor] = {}
        #: The keys of variables' handles, and of other tensors outside of graphs.
        self.outside: set[Any] = set()
        todo = collections.deque((value, None) for value in values)
        while todo:
            inner, consumer = todo.popleft()
            tensor = outermost(inner, is_argument)
            if tensor is None:
                continue
            key = key_of(tensor)
            if isinstance(tensor, tf.__internal__.EagerTensor):
                self.outside.add(key)
                continue
            if consumer is not None:
                self._made_of_it[key].add(consumer)
            if key not in self._tensors:
                self._tensors[key] = tensor
                if not is_end(tensor):
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

    def key(self, value: tf.Tensor) -> Any:
        """The key of one of the values; None: it is an argument."""
        tensor = outermost(value, self._is_argument)
        return None if tensor is None else key_of(tensor)


# Whether a value is made of a replica's own rows, told from the graph.


#: What an operation makes of the shape of its input, and not of values.
SHAPES = frozenset(("OnesLike", "Shape", "ShapeN", "Size", "ZerosLike"))
#: See `ReplicaRun.batches`.
Batches: TypeAlias = Mapping[int, Sequence[tf.Tensor]]


def batch_keys(batches: Batches, trace: int) -> set[Any]:
    """The keys (`key_of`) of the tensors that the replica of `trace` was given."""
    return {key_of(tensor) for tensor in batches.get(trace, ())}


class DependsOn:
    """All that is made of some tensors; `value in DependsOn(keys)`.

    What was found is remembered: many values of one step are asked for, and each is
    made of the whole model before it.

    Args:
      keys: the keys (`key_of`) of these tensors.
      is_end: what the ways back end at, such as sums over replicas.
    """

    def __init__(
        self, keys: set[Any], is_end: Callable[[tf.Tensor], bool] = is_exchanged
    ) -> None:
        self.keys = keys
        self._is_end = is_end
        self._found: dict[Any, bool] = dict.fromkeys(keys, True)

    def _is_one(self, tensor: tf.Tensor) -> bool:
        return key_of(tensor) in self.keys

    def __contains__(self, value: tf.Tensor) -> bool:
        # Depth first, by a list: graphs are deeper than Python's stack.
        path: list[tuple[Any, Iterator[tf.Tensor]]] = [(None, iter([value]))]
        while path:
            tensor = next(path[-1][1], None)
            if tensor is None:
                path.pop()
                continue
            tensor = outermost(tensor, self._is_one)
            if tensor is None or isinstance(tensor, tf.__internal__.EagerTensor):
                continue
            key = key_of(tensor)
            if key not in self._found:
                # Until one of its inputs is found to be.
                self._found[key] = False
                if not self._is_end(tensor):
                    path.append((key, iter(goes_into(tensor))))
            elif self._found[key]:
                self._found.update((key, True) for key, _ in path[1:])
                return True
        return False


def is_of_own_rows(batches: Batches, trace: int, value: tf.Tensor) -> bool:
    """Whether `value` is made of the replica's rows, and not of all replicas' as well.

    What was gathered, or added up where replicas meet, is made of all.
    """
    if value not in DependsOn(batch_keys(batches, trace)):
        return False
    others = [batch_keys(batches, other) for other in batches if other != trace]
    return not others or not all(value in DependsOn(batch) for batch in others)


# Which of the values that a step stores are made of a replica's share of the loss.
#
# The loss that a step differentiates is the replica's share, a part of a sum. So are
# its gradients, and what is made of either is no mean over rows. Gradients that a
# program only adds up are parts of a sum in the end as well, and are kept as such.


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
    ways = Dependencies(terms)
    of_shares = ways.from_those(shares.is_factor)
    mixed: list[Any] = []
    sums: list[Any] = []
    for (variable, handle, _), term, own in zip(stored, terms, added, strict=True):
        if ways.key(term) in of_shares:
            is_sum = own is not None and key_of(handle) not in ways.outside
            (sums if is_sum else mixed).append(variable)
    return mixed, sums


# Whether something is of the rows of all replicas already, told from the graph.


def are_of_sums_alone(
    values: Sequence[Any], batch: set[Any], *, or_of_gathered: bool = False
) -> list[bool]:
    """Which values, of a graph, are made of rows by exchanges of replicas only.

    Args:
      values: tensors, or slices.
      batch: the keys of the tensors that the replica was given.
      or_of_gathered: whether rows of all replicas count as made so, but for those that
        a replica takes of them as its own.
    """

    def is_batch(tensor: tf.Tensor) -> bool:
        is_own = or_of_gathered and is_named(tensor, OWN_ROWS)
        return is_own or key_of(tensor) in batch

    def is_met(tensor: tf.Tensor) -> bool:
        is_gathered = or_of_gathered and is_named(tensor, GATHERED_ROWS)
        return is_gathered or is_exchanged(tensor)

    def is_end(tensor: tf.Tensor) -> bool:
        # How many rows there are says nothing of them.
        return is_batch(tensor) or is_met(tensor) or tensor.op.type in SHAPES

    parts = [tf.nest.flatten(value, expand_composites=True) for value in values]
    ways = Dependencies(itertools.chain(*parts), is_end, is_argument=is_batch)
    of_rows, of_sums = ways.from_those(is_batch), ways.from_those(is_met)
    keys = [set(map(ways.key, each)) for each in parts]
    return [
        not each & (of_rows | ways.outside) and bool(each & of_sums) for each in keys
    ]
