"""What replicas do to what they share, in an order in which nobody waits for himself.

The graphs of replicas are built one after the other, and TensorFlow runs what has side
effects in the order in which it was built: all that one replica prints, checks, asks of
Python (`tf.py_function`) or does to a table before all that the next one does. Where
one does so behind an exchange, and the next before it, the two would wait for each
other. So here it runs by how many exchanges lie before it; of those alike, in the order
in which it was built. Replicas that stop at each exchange until the others are there,
as those of `tf.distribute.MirroredStrategy` do, have the same order.
"""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdp._private.autograph import library_code
from tfdp._private.side_effects import (
    has_effects,
    is_ordered_here,
    ordered_by_us,
    touched_by,
    unordered,
)
from tfdp.errors import CollectiveError
from tfdp.tracing.meetings import Edge, Meeting, levels_of, meetings_of

__all__ = ["ReplicaEffects"]

#: By the handle of a resource, as a reference: what is done to it. None: what has
#: effects and touches none.
Groups: TypeAlias = dict[Any, list[tf.Operation]]


class ReplicaEffects:
    """Sees replicas being built in a graph, and puts in order what they do."""

    def __init__(self) -> None:
        self._is_needed = not tf.executing_eagerly() and is_ordered_here()
        self._first = len(_operations()) if self._is_needed else 0
        self._begun: list[int] = []
        self._ended: list[int] = []

    def seen(self, replica: Callable) -> Callable:
        """`replica`, what each of them runs, whose operations are told apart."""
        if not self._is_needed:
            return replica

        @library_code
        @functools.wraps(replica)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._begun.append(len(_operations()))
            result = replica(*args, **kwargs)
            self._ended.append(len(_operations()))
            return result

        return noted

    def put_in_order(self) -> Groups:
        """When all replicas are built: lets nobody wait for himself.

        Returns:
          What several replicas do to resources of which there is but one.

        Raises:
          CollectiveError: when there is no such order, since a function does to several
            things at once what has to be done apart.
        """
        if len(self._begun) < 2:
            return {}
        ops = _operations()[self._first :]
        shared = self._shared(ops)
        meetings = meetings_of(ops) if shared else {}
        if meetings:
            self._order(ops, shared, meetings)
        return {handle: group for handle, group in shared.items() if handle is not None}

    def _order(
        self, ops: list[tf.Operation], shared: Groups, meetings: dict[Any, Meeting]
    ) -> None:
        ours = {
            handle: group
            for handle, group in shared.items()
            if all(len(_handles(op)) < 2 for op in group)
        }
        edges = [*_edges_of_tensorflow(ops, ours), *self._edges_in_replicas(ops, ours)]
        levels = levels_of(ops, meetings, edges)
        stuck = [op for group in shared.values() for op in group if op not in levels]
        if stuck:
            raise CollectiveError(_message(stuck))
        alone = unordered()
        earlier = [op for op in _operations()[: self._first] if op not in alone]
        for handle, group in ours.items():
            # Of one level they stay as they were built.
            ordered = sorted(group, key=levels.__getitem__)
            before = [op for op in earlier if _is_ordered_by(handle, op)]
            last = ordered_by_us(ordered, before[-1:] if handle is None else before)
            _leave_behind(last, handle)

    def _shared(self, ops: Sequence[tf.Operation]) -> Groups:
        """What several replicas do to what they share, and not only read."""
        groups: Groups = collections.defaultdict(list)
        replicas = collections.defaultdict(set)
        written: set[Any] = {None}
        alone = unordered()
        for place, op in enumerate(ops, start=self._first):
            if not has_effects(op) or op in alone:
                continue
            reads, writes = touched_by(op)
            written.update(handle.ref() for handle in writes)
            for handle in [one.ref() for one in (*reads, *writes)] or [None]:
                groups[handle].append(op)
                replicas[handle].add(self._replica_at(place))
        return {
            handle: group
            for handle, group in groups.items()
            if handle in written and len(replicas[handle]) > 1
        }

    def _replica_at(self, place: int) -> int:
        """How many replicas were begun when the operation at `place` was built."""
        return bisect.bisect_right(self._begun, place)

    def _edges_in_replicas(
        self, ops: Sequence[tf.Operation], groups: Groups
    ) -> Iterator[Edge]:
        """The order of each replica's program."""
        if any(map(operator.gt, self._ended, self._begun[1:])):
            return  # they took turns (`merge_call`): whose an operation is nobody knows
        places = {op: place for place, op in enumerate(ops, start=self._first)}
        for group in groups.values():
            for first, second in itertools.pairwise(group):
                if self._replica_at(places[first]) == self._replica_at(places[second]):
                    yield first, second


def _edges_of_tensorflow(ops: Sequence[tf.Operation], but: Groups) -> Iterator[Edge]:
    """What TensorFlow will have wait for what, except for what is done to `but`."""
    writer: dict[Any, tf.Operation] = {}
    readers = collections.defaultdict(list)
    alone = unordered()
    for op in ops:
        if op in alone:
            continue
        reads, writes = ([one.ref() for one in some] for some in touched_by(op))
        for handle in (*reads, *writes):
            if handle not in but and handle in writer:
                yield writer[handle], op
        for handle in reads:
            readers[handle].append(op)
        for handle in writes:
            if handle not in but:
                yield from ((reader, op) for reader in readers.pop(handle, ()))
            writer[handle] = op


def _handles(op: tf.Operation) -> list[tf.Tensor]:
    reads, writes = touched_by(op)
    return [*reads, *writes]


def _is_ordered_by(handle: Any, op: tf.Operation) -> bool:
    if handle is None:
        return has_effects(op) and not _handles(op)
    return any(one.ref() == handle for one in _handles(op))


def _leave_behind(last: tf.Operation, handle: Any) -> None:
    """Lets TensorFlow order what is built later in the graph behind `last`."""
    with tf.control_dependencies([last]):
        if handle is None:
            tf.debugging.Assert(True, [""])
        else:
            tf.identity(handle.deref())


def _operations() -> list[tf.Operation]:
    return tf.compat.v1.get_default_graph().get_operations()


def _message(stuck: Sequence[tf.Operation]) -> str:
    return (
        "All replicas of this step use something that was not made in "
        "strategy.scope(), such as a variable or a table, before exchanges between "
        "replicas as well as behind them, in functions or conditionals that do more: "
        f"{', '.join(op.name for op in stuck)}. They would wait for each other for "
        "ever. Make a variable in strategy.scope(), so that each replica has its own, "
        "or read and change it in the step itself."
    )
