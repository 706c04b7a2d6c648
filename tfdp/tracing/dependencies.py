"""Dependency analysis on graphs: what values depend on, in one walk for many values."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdp._private.names import own_copy
from tfdp.tracing.assigned_terms import term_added_to
from tfdp.tracing.loss_shares import inputs_of
from tfdp.tracing.replica_invariance import (
    GATHERED_ROWS,
    OWN_ROWS,
    is_exchanged,
    is_named,
    key_of,
    outermost,
)
from tfdp.tracing.run import ReplicaRun, trace_of


class Dependencies:
    """All ancestors of some values of graphs, with the edges between, in one walk. It
    stops at tensors for which `is_end`, and at arguments for which `is_argument`."""

    def __init__(
        self,
        values: Iterable[tf.Tensor],
        is_end: Callable[[tf.Tensor], bool] = is_exchanged,
        is_argument: Callable[[tf.Tensor], bool] = lambda tensor: False,
    ) -> None:
        self._is_argument = is_argument
        #: By the key of a tensor: the keys of its consumers.
        self._consumers: dict[Any, set[Any]] = collections.defaultdict(set)
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
                self._consumers[key].add(consumer)
            if key not in self._tensors:
                self._tensors[key] = tensor
                if not is_end(tensor):
                    todo.extend((before, key) for before in inputs_of(tensor))

    def dependents_of(self, is_found: Callable[[tf.Tensor], bool]) -> set[Any]:
        """The keys of all values that depend on a tensor which `is_found`."""
        todo = [key for key, tensor in self._tensors.items() if is_found(tensor)]
        found = set()
        while todo:
            key = todo.pop()
            if key not in found:
                found.add(key)
                todo += self._consumers[key]
        return found

    def key(self, value: tf.Tensor) -> Any:
        tensor = outermost(value, self._is_argument)
        return None if tensor is None else key_of(tensor)


#: Ops that depend on the shape of their input, not on its values.
SHAPES = frozenset(("OnesLike", "Shape", "ShapeN", "Size", "ZerosLike"))
#: See `ReplicaRun.batches`.
Batches: TypeAlias = Mapping[int, Sequence[tf.Tensor]]


def batch_keys(batches: Batches, trace: int) -> set[Any]:
    """The keys (`key_of`) of the replica's batch."""
    return {key_of(tensor) for tensor in batches.get(trace, ())}


class DependsOn:
    """What depends on tensors with these keys, up to `is_end`: `value in
    DependsOn(keys)`. Results are cached, as each query may walk the whole model."""

    def __init__(
        self, keys: set[Any], is_end: Callable[[tf.Tensor], bool] = is_exchanged
    ) -> None:
        self.keys = keys
        self._is_end = is_end
        self._found: dict[Any, bool] = dict.fromkeys(keys, True)

    def __contains__(self, value: tf.Tensor) -> bool:
        # Depth first with an explicit stack: graphs are deeper than Python's stack.
        path: list[tuple[Any, Iterator[tf.Tensor]]] = [(None, iter([value]))]
        while path:
            tensor = next(path[-1][1], None)
            if tensor is None:
                path.pop()
                continue
            tensor = outermost(tensor, lambda one: key_of(one) in self.keys)
            if tensor is None or isinstance(tensor, tf.__internal__.EagerTensor):
                continue
            key = key_of(tensor)
            if key not in self._found:
                # Until one of its inputs is found.
                self._found[key] = False
                if not self._is_end(tensor):
                    path.append((key, iter(inputs_of(tensor))))
            elif self._found[key]:
                self._found.update((key, True) for key, _ in path[1:])
                return True
        return False


def is_of_own_rows(batches: Batches, trace: int, value: tf.Tensor) -> bool:
    """Whether `value` depends on the replica's rows, and not on all replicas' rows."""
    if value not in DependsOn(batch_keys(batches, trace)):
        return False
    others = [batch_keys(batches, other) for other in batches if other != trace]
    return not others or not all(value in DependsOn(batch) for batch in others)


def stored_from_shares(run: ReplicaRun) -> tuple[list[Any], list[Any]]:
    """Variables in which a replica stored values that depend on its loss share: those
    that are averaged over replicas; and those that only accumulate values that do not
    depend on them, which remain parts of a sum.

    A share and its gradients are parts of a sum, not means over rows.
    """
    rank = next((rank for rank, _, _ in run.stored), 0)
    shares = run.shares.get(trace_of(rank))
    if not shares:
        return [], []
    stored = []
    for by, variable, value in run.stored:
        if by == rank and id(variable) not in run.own_sums:
            handle = outermost(own_copy(variable, rank).handle)
            added = term_added_to(handle, value)
            term = value if added is None else added
            stored.append((variable, handle, added is not None, term))
    analysis = Dependencies(term for *_, term in stored)
    of_shares = analysis.dependents_of(shares.is_factor)
    averaged: list[Any] = []
    sums: list[Any] = []
    for variable, handle, is_added, term in stored:
        if analysis.key(term) in of_shares:
            is_sum = is_added and key_of(handle) not in analysis.outside
            (sums if is_sum else averaged).append(variable)
    return averaged, sums


def are_reduced(
    values: Sequence[Any], batch: set[Any], *, or_of_gathered: bool = False
) -> list[bool]:
    """Which values, of a graph, depend on rows only through exchanges of replicas, or
    with `or_of_gathered` through gathered rows, except a replica's own."""

    def is_batch(tensor: tf.Tensor) -> bool:
        is_own = or_of_gathered and is_named(tensor, OWN_ROWS)
        return is_own or key_of(tensor) in batch

    def is_reduced(tensor: tf.Tensor) -> bool:
        is_gathered = or_of_gathered and is_named(tensor, GATHERED_ROWS)
        return is_gathered or is_exchanged(tensor)

    def is_end(tensor: tf.Tensor) -> bool:
        # The number of rows says nothing about their values.
        return is_batch(tensor) or is_reduced(tensor) or tensor.op.type in SHAPES

    parts = [tf.nest.flatten(value, expand_composites=True) for value in values]
    analysis = Dependencies(itertools.chain(*parts), is_end, is_argument=is_batch)
    of_rows, of_sums = (
        analysis.dependents_of(is_batch),
        analysis.dependents_of(is_reduced),
    )
    keys = [set(map(analysis.key, each)) for each in parts]
    return [
        not each & (of_rows | analysis.outside) and bool(each & of_sums)
        for each in keys
    ]
