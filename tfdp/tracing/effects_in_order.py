"""What replicas do to what they share, in an order in which nobody waits for himself.

The graphs of replicas are built one after the other, and TensorFlow runs what has side
effects in the order in which it was built: all that one replica prints, checks, asks of
Python (`tf.py_function`) or does to a table before all that the next one does. Where
one does so behind an exchange, and the next before it, the two would wait for each
other. So here it runs by how many exchanges a replica's program has before it; of those
alike, in the order in which it was built. Replicas that stop at each exchange until the
others are there, as those of `tf.distribute.MirroredStrategy` do, have the same order.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdp._private.names import is_of_whole, run_independently
from tfdp._private.side_effects import (
    has_effects,
    is_ordered_here,
    run_behind,
    touched_by,
    unordered,
)
from tfdp.errors import CollectiveError
from tfdp.tracing.meetings import Edge, Meeting, exchanges_of, levels_of, meetings_of
from tfdp.tracing.replica_invariance import outermost
from tfdp.tracing.whose_operation import ReplicaPlaces, operations

__all__ = ["ReplicaEffects"]

#: By the handle of a resource, as a reference: what is done to it. None: what has
#: effects and touches none.
Groups: TypeAlias = dict[Any, list[tf.Operation]]


class ReplicaEffects:
    """Sees replicas being built in a graph, and puts in order what they do."""

    def __init__(self) -> None:
        self._is_needed = not tf.executing_eagerly() and is_ordered_here()
        self._first = len(operations()) if self._is_needed else 0
        self._places = ReplicaPlaces()

    def seen(self, replica: Callable) -> Callable:
        """`replica`, what each of them runs, whose operations are told apart."""
        return self._places.seen(replica) if self._is_needed else replica

    def put_in_order(self) -> Groups:
        """When all replicas are built: lets nobody wait for himself.

        Returns:
          What several replicas do to resources of which there is but one.

        Raises:
          CollectiveError: when there is no such order, since a function meets other
            replicas and does more to what they share.
        """
        if self._places.replicas < 2:
            return {}
        ops = operations()[self._first :]
        replica_of = self._places.of(ops, self._first)
        shared = _shared(ops, replica_of)
        meetings = meetings_of(ops, replica_of) if shared else {}
        if meetings:
            self._order(ops, shared, meetings, replica_of)
        return {handle: group for handle, group in shared.items() if handle is not None}

    def _order(
        self,
        ops: list[tf.Operation],
        shared: Groups,
        meetings: dict[tf.Operation, Meeting],
        replica_of: dict[tf.Operation, int],
    ) -> None:
        # What meets others on its way does so behind its beginning: TensorFlow's order
        # stays, and is good or not.
        ours = {
            handle: group
            for handle, group in shared.items()
            if not any(op in meetings for op in group)
        }
        moved = dict.fromkeys(op for group in ours.values() for op in group)
        of_others = list(_edges_of_tensorflow(operations(), ours))
        ordered = _by_programs(ops, ours, meetings, replica_of)
        levels = levels_of(ops, meetings, [*of_others, *_chains(ordered)])
        if any(op not in levels for op in moved):
            # Replicas build exchanges in different orders: what the graph says is left.
            in_replicas = _edges_in_replicas(ours, replica_of)
            levels = levels_of(ops, meetings, [*of_others, *in_replicas])
            ordered = {
                handle: sorted(group, key=lambda op: levels.get(op, 0))
                for handle, group in ours.items()
            }
        stuck = [op for group in shared.values() for op in group if op not in levels]
        if stuck:
            raise CollectiveError(_message(stuck))
        alone = unordered()
        built_before = operations()[: self._first]
        earlier = _done_to(op for op in built_before if op not in alone)
        for op in moved:
            run_independently(op)
        for first, second in of_others:
            if first in moved or second in moved:
                run_behind(second, [first])
        for handle, group in ordered.items():
            last = earlier.get(handle, [])
            last = last[-1:] if handle is None else last
            for op in group:
                run_behind(op, last)
                last = [op]
            _leave_behind(last, handle)
        for handle, last in _done_to(moved).items():
            if handle not in ours:
                _leave_behind(last, handle)


def _shared(ops: Sequence[tf.Operation], replica_of: dict[tf.Operation, int]) -> Groups:
    """What several replicas do to what they share, and not only read."""
    alone = unordered()
    groups = _done_to(op for op in ops if has_effects(op) and op not in alone)
    return {
        handle: group
        for handle, group in groups.items()
        if len({replica_of[op] for op in group}) > 1
        and any(_changes(op, handle) for op in group)
        and not _is_of_a_replica(handle)
    }


def _changes(op: tf.Operation, handle: Any) -> bool:
    _, writes = touched_by(op)
    return handle is None or any(one.ref() == handle for one in writes)


def _is_of_a_replica(handle: Any) -> bool:
    """Whether it is a replica's own copy, such as a slot that the step has made: all
    copies get their first values by one who makes them for all."""
    found = None if handle is None else outermost(handle.deref())
    return found is not None and is_of_whole(found)


def _by_programs(
    ops: Sequence[tf.Operation],
    groups: Groups,
    meetings: dict[tf.Operation, Meeting],
    replica_of: dict[tf.Operation, int],
) -> Groups:
    """As replicas do that stop at each exchange until all others are there."""
    seen: dict[int, set[Any]] = collections.defaultdict(set)
    behind = {}
    for op in ops:
        if op in meetings:
            seen[replica_of[op]] |= exchanges_of(meetings[op])
        behind[op] = len(seen[replica_of[op]])
    return {
        handle: sorted(group, key=behind.__getitem__)
        for handle, group in groups.items()
    }


def _chains(groups: Groups) -> Iterator[Edge]:
    for group in groups.values():
        yield from itertools.pairwise(group)


def _edges_in_replicas(
    groups: Groups, replica_of: dict[tf.Operation, int]
) -> Iterator[Edge]:
    """The order of each replica's program, for each thing that is done to."""
    for group in groups.values():
        last: dict[int, tf.Operation] = {}
        for op in group:
            before = last.get(replica_of[op])
            if before is not None:
                yield before, op
            last[replica_of[op]] = op


def _edges_of_tensorflow(
    ops: Sequence[tf.Operation], but: Collection[Any]
) -> Iterator[Edge]:
    """What TensorFlow will have wait for what, except for what is done to `but`."""
    writer: dict[Any, tf.Operation] = {}
    readers = collections.defaultdict(list)
    alone = unordered()
    for op in ops:
        if op in alone:
            continue
        reads, writes = ([one.ref() for one in some] for some in touched_by(op))
        reads = [handle for handle in reads if handle not in but]
        writes = [handle for handle in writes if handle not in but]
        yield from ((writer[h], op) for h in (*reads, *writes) if h in writer)
        for handle in reads:
            readers[handle].append(op)
        for handle in writes:
            yield from ((reader, op) for reader in readers.pop(handle, ()))
            writer[handle] = op


def _done_to(ops: Iterable[tf.Operation]) -> Groups:
    """`ops` by what they are done to; what has no effects and touches nothing is left
    out."""
    found: Groups = collections.defaultdict(list)
    for op in ops:
        reads, writes = touched_by(op)
        handles = [handle.ref() for handle in (*reads, *writes)]
        for handle in handles or ([None] if has_effects(op) else []):
            found[handle].append(op)
    return found


def _leave_behind(last: Sequence[tf.Operation], handle: Any) -> None:
    """Lets TensorFlow order what is built later in the graph behind `last`."""
    with tf.control_dependencies(last):
        if handle is None:
            tf.debugging.Assert(True, [""])
        else:
            tf.identity(handle.deref())


def _message(stuck: Sequence[tf.Operation]) -> str:
    return (
        "Replicas of this step use something of which there is but one (a variable or "
        "a table that was not made in strategy.scope(), or Python) in functions or "
        "conditionals that meet the other replicas, too: "
        f"{', '.join(op.name for op in stuck)}. They would wait for each other for "
        "ever. Make a variable in strategy.scope(), so that each replica has its own, "
        "or do it in the step itself."
    )
