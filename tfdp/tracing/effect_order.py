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

import bisect
import collections
import functools
import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdp._private.functions import library_code
from tfdp._private.names import is_of_whole, run_independently
from tfdp._private.step_ops import (
    graphs_called,
    has_effects,
    is_ordered_here,
    run_behind,
    touched_by,
    unordered,
)
from tfdp.errors import CollectiveError
from tfdp.tracing.dependencies import is_of_own_rows
from tfdp.tracing.loss_shares import ancestors
from tfdp.tracing.replica_invariance import is_exchanged, outermost
from tfdp.tracing.run import ReplicaRun

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
        meetings = collectives_of(ops, replica_of) if shared else {}
        if meetings:
            self._order(ops, shared, meetings, replica_of)
        return {handle: group for handle, group in shared.items() if handle is not None}

    def _order(
        self,
        ops: list[tf.Operation],
        shared: Groups,
        meetings: dict[tf.Operation, Collective],
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
    meetings: dict[tf.Operation, Collective],
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


# Where the replicas of a step meet, told from its graph.
#
# An operation that takes part in an exchange waits for those of other replicas that do,
# which is no edge of the graph.


#: An operation, and one that runs behind it.
Edge: TypeAlias = tuple[tf.Operation, tf.Operation]
# The names of what an operation brings to exchanges, and of what it waits for.
Names: TypeAlias = tuple[set[Any], set[Any]]
#: The same, each with how often the replica has had it before.
Collective: TypeAlias = tuple[set[Any], set[Any]]


def collectives_of(
    ops: Sequence[tf.Operation], replica_of: Mapping[tf.Operation, int]
) -> dict[tf.Operation, Collective]:
    """Those of `ops` that take part in exchanges: which they give to and wait for.

    A function that is called, and a conditional, take part in all that is within them.
    Called twice, it has each name twice: then the first of one replica meets the first
    of another.

    Args:
      ops: of a step, in the order of building.
      replica_of: whose each of them is.
    """
    known: dict[int, Names] = {}
    times: collections.Counter[Any] = collections.Counter()
    found = {}
    for op in ops:
        names = _names_of(op, known)
        if not any(names):
            continue
        replica = replica_of[op]
        brings, awaits = (
            {(name, times[replica, side, name]) for name in some}
            for side, some in enumerate(names)
        )
        times.update(
            (replica, side, name) for side, some in enumerate(names) for name in some
        )
        found[op] = brings, awaits
    return found


def _names_of(op: tf.Operation, known: dict[int, Names]) -> Names:
    if op.type in ("Send", "Recv"):
        name = op.get_attr("tensor_name").decode()
        return ({name}, set()) if op.type == "Send" else (set(), {name})
    if op.type.startswith("Collective") and len(op.inputs) > 3:
        # A key that is not known is a size; its group's key is of this exchange only.
        name = tuple(repr(tf.get_static_value(key)) for key in op.inputs[2:4])
        return {name}, {name}
    brings: set[Any] = set()
    awaits: set[Any] = set()
    for graph in graphs_called(op):
        if id(graph) not in known:
            known[id(graph)] = set(), set()
            inner = [_names_of(one, known) for one in graph.get_operations()]
            known[id(graph)] = (
                set().union(*(some for some, _ in inner)),
                set().union(*(some for _, some in inner)),
            )
        brings |= known[id(graph)][0]
        awaits |= known[id(graph)][1]
    return brings, awaits


def exchanges_of(meeting: Collective) -> set[Any]:
    """The exchanges that an operation takes part in: names, alike on all replicas."""
    # Where replicas hand tensors over one exchange has several names, below its own.
    return {
        (tuple(name.split("/")[:3]) if isinstance(name, str) else name, time)
        for names in meeting
        for name, time in names
    }


def levels_of(
    ops: Sequence[tf.Operation],
    meetings: dict[tf.Operation, Collective],
    edges: Collection[Edge],
) -> dict[tf.Operation, int]:
    """How many exchanges lie before each of `ops`, at most, on any way to it.

    Args:
      ops: of one graph.
      meetings: see `collectives_of`.
      edges: which of `ops` run behind which, besides those that the graph has.

    Returns:
      Without those operations that wait, by way of others, for themselves: they would
      never run.
    """
    inside = set(ops)
    behind = collections.defaultdict(list)
    for first, second in edges:
        behind[second].append(first)
    bringing = collections.defaultdict(list)
    for op, (brings, _) in meetings.items():
        for name in brings:
            bringing[name].append(op)

    def begins_after(op: tf.Operation) -> Iterator[Any]:
        given = (tensor.op for tensor in op.inputs)
        for before in (*given, *op.control_inputs, *behind[op]):
            if before in inside:
                yield before, "ends"

    def ends_after(op: tf.Operation) -> Iterator[Any]:
        yield op, "begins"
        for name in meetings.get(op, ((), ()))[1]:
            for other in bringing[name]:
                yield other, "begins"

    waits = {(op, "begins"): set(begins_after(op)) for op in ops}
    waits |= {(op, "ends"): set(ends_after(op)) for op in ops}
    followers = collections.defaultdict(list)
    for event, awaited in waits.items():
        for other in awaited:
            followers[other].append(event)
    missing = {event: len(awaited) for event, awaited in waits.items()}
    levels = dict.fromkeys((event for event in waits if not missing[event]), 0)
    todo = list(levels)
    while todo:
        event = todo.pop()
        op, what = event
        if what == "ends" and op in meetings:
            levels[event] += 1
        for after in followers[event]:
            levels[after] = max(levels.get(after, 0), levels[event])
            missing[after] -= 1
            if not missing[after]:
                todo.append(after)
    return {
        op: levels[op, "begins"]
        for op in ops
        if (op, "ends") in levels and not missing[op, "ends"]
    }


# Which replica an operation of a step is of, told from when and where it was built.


def operations() -> list[tf.Operation]:
    """All operations of the graph that is being built, in the order of building."""
    return tf.compat.v1.get_default_graph().get_operations()


class ReplicaPlaces:
    """Notes while the replicas of a run are built, one after the other or by turns."""

    def __init__(self) -> None:
        self._begun: list[int] = []
        self._ended: list[int] = []
        self._scopes: list[str] = []

    def seen(self, replica: Callable) -> Callable:
        """`replica`, what each of them runs, whose operations are told apart."""

        @library_code
        @functools.wraps(replica)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._begun.append(len(operations()))
            self._scopes.append(tf.compat.v1.get_default_graph().get_name_scope())
            result = replica(*args, **kwargs)
            self._ended.append(len(operations()))
            return result

        return noted

    @property
    def replicas(self) -> int:
        """How many have been seen."""
        return len(self._begun)

    def of(self, ops: Sequence[tf.Operation], first: int) -> dict[tf.Operation, int]:
        """The replica of each of `ops`, the first of which was built as number `first`.

        Those that took turns (`merge_call`) are told by their name scopes, which the
        first replica shares with what is none's.
        """
        took_turns = any(map(operator.gt, self._ended, self._begun[1:]))
        if not took_turns:
            return {
                op: max(0, bisect.bisect_right(self._begun, place) - 1)
                for place, op in enumerate(ops, start=first)
            }
        scopes = [(f"{scope}/", n) for n, scope in enumerate(self._scopes) if n]
        return {
            op: next((n for scope, n in scopes if op.name.startswith(scope)), 0)
            for op in ops
        }


# Variables of which there is one for all replicas, and what these make of it.
#
# Such a variable was made outside of the strategy's scope. Each replica's program runs
# on it in turn, where one device would run it once.


ADDITIONS = ("AssignAddVariableOp", "AssignSubVariableOp")
EXTREMES = ("Maximum", "Minimum")


def suspect_shared(
    run: ReplicaRun, shared: Mapping[Any, Sequence[tf.Operation]]
) -> None:
    """Notes variables that are not what one device would have made of them.

    Args:
      run: whose replicas are traced.
      shared: by the handle of a resource, as a reference, what several replicas do.
    """
    for handle, group in shared.items():
        found = [what for op in group if (what := _what_is_wrong(run, op))]
        if len(found) < 2:
            continue  # nothing, or one replica does it for all
        what = found[0]
        run.state_suspicions.add(
            f"the variable {_name_of(handle.deref())!r}, which was not made in "
            f"strategy.scope(), {what}. Make it in strategy.scope(): then each replica "
            "has its own, which are brought together"
        )


def _what_is_wrong(run: ReplicaRun, op: tf.Operation) -> str | None:
    if op.type in ADDITIONS:
        # What replicas add of their rows is that of all rows; a count of steps is not.
        step = tf.get_static_value(op.inputs[1])
        is_count = step is not None and step.shape == () and abs(step) == 1
        return f"is counted up by each of {run.replicas} replicas" if is_count else None
    if op.type != "AssignVariableOp":
        return None
    handle, value = op.inputs
    if value.op.type in EXTREMES:
        return None  # the same, however often
    if any(read is handle for read in _read_for(value)):
        return (
            f"is assigned to by each of {run.replicas} replicas, by what it was before"
        )
    if any(is_of_own_rows(run.batches, trace, value) for trace in run.batches):
        return "keeps what the last replica makes of its own rows"
    return None


def _read_for(value: tf.Tensor) -> Iterator[tf.Tensor]:
    """The handles of the variables that `value` is made of, but by no exchange."""
    for tensor in ancestors(value, is_behind=is_exchanged):
        if tensor.op.type == "ReadVariableOp":
            yield tensor.op.inputs[0]


def _name_of(handle: tf.Tensor) -> str:
    # A handle is all there is of the variable here, and only its words have the name.
    named = re.search(r'name="([^"]*?)(/\d+)?"', str(outermost(handle)))
    return named[1] if named else handle.name
