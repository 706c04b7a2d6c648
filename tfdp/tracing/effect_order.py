"""Orders side effects on shared resources so that replicas cannot deadlock.

TensorFlow runs side effects in the order of building, and builds replicas one after the
other: all that one replica prints, checks, calls in Python (`tf.py_function`) or does
to a table runs before the next replica's. If one does so after an exchange and the next
one before it, they deadlock. So side effects run in the order of how many exchanges
precede them in a replica's program, as under `tf.distribute.MirroredStrategy`.
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
from tfdp.lint.op_kinds import adds_to_variable, assigns, is_extreme
from tfdp.lint.terms import handle_of, outermost
from tfdp.tracing.step import Step

Ops: TypeAlias = Sequence[tf.Operation]
#: The replica of each operation.
Replicas: TypeAlias = Mapping[tf.Operation, int]
#: Ops by the handle (as a reference) of the resource they touch; None: ops with
#: side effects that touch no resource.
Groups: TypeAlias = dict[Any, list[tf.Operation]]
#: An operation, and one that runs after it.
Edge: TypeAlias = tuple[tf.Operation, tf.Operation]
# The names of what an operation sends to exchanges, and of what it waits for.
Names: TypeAlias = tuple[set[Any], set[Any]]
#: By operation: the same, each name with the number of its earlier uses in the replica.
Collectives: TypeAlias = dict[tf.Operation, Names]


class ReplicaEffects:
    """Records replicas while a graph is built, and orders their side effects."""

    def __init__(self) -> None:
        self._is_needed = is_ordered_here()
        self._first = len(operations()) if self._is_needed else 0
        self._places = ReplicaPlaces()

    def seen(self, replica: Callable) -> Callable:
        """Wraps `replica`, so that its operations are attributed to it."""
        return self._places.seen(replica) if self._is_needed else replica

    def put_in_order(self) -> Groups:
        """Orders side effects when all replicas are built; returns ops from several
        replicas that touch a single shared resource.

        Raises:
          CollectiveError: when there is no such order, because a function takes part in
            exchanges and touches more shared resources.
        """
        if self._places.replicas < 2:
            return {}
        ops = operations()[self._first :]
        replica_of = self._places.of(ops, self._first)
        shared = _shared(ops, replica_of)
        collectives = collectives_of(ops, replica_of) if shared else {}
        if collectives:
            self._order(ops, shared, collectives, replica_of)
        return {handle: group for handle, group in shared.items() if handle is not None}

    def _order(
        self, ops: Ops, shared: Groups, collectives: Collectives, replica_of: Replicas
    ) -> None:
        # Ops that take part in exchanges themselves keep TensorFlow's order.
        ours = {
            handle: group
            for handle, group in shared.items()
            if not any(op in collectives for op in group)
        }
        moved = dict.fromkeys(op for group in ours.values() for op in group)
        of_others = list(_edges_of_tensorflow(operations(), ours))
        ordered = _by_programs(ops, ours, collectives, replica_of)
        chains = itertools.chain.from_iterable(
            itertools.pairwise(group) for group in ordered.values()
        )
        levels = levels_of(ops, collectives, [*of_others, *chains])
        if any(op not in levels for op in moved):
            # Replicas build exchanges in different orders: use the graph's edges alone.
            in_replicas = _edges_in_replicas(ours, replica_of)
            levels = levels_of(ops, collectives, [*of_others, *in_replicas])
            ordered = {
                handle: sorted(group, key=lambda op: levels.get(op, 0))
                for handle, group in ours.items()
            }
        stuck = [op for group in shared.values() for op in group if op not in levels]
        if stuck:
            raise CollectiveError(
                "Replicas of this step use a single shared resource (a variable or a "
                "table that was not made in strategy.scope(), or Python) in functions "
                "or conditionals that also exchange values with other replicas: "
                f"{', '.join(op.name for op in stuck)}. They would deadlock. Make a "
                "variable in strategy.scope(), so that each replica has its own, or do "
                "it in the step itself."
            )
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


def _shared(ops: Ops, replica_of: Replicas) -> Groups:
    """Side effects of several replicas on shared resources, reads alone left out."""
    alone = unordered()
    groups = _done_to(op for op in ops if has_effects(op) and op not in alone)
    return {
        handle: group
        for handle, group in groups.items()
        if len({replica_of[op] for op in group}) > 1
        and (handle is None or _is_shared(handle, group))
    }


def _is_shared(handle: Any, group: Ops) -> bool:
    if not any(handle == one.ref() for op in group for one in touched_by(op)[1]):
        return False  # only read
    # Not a copy such as a slot made in the step: one replica initializes all copies.
    found = outermost(handle.deref())
    return found is None or not is_of_whole(found)


def _by_programs(
    ops: Ops, groups: Groups, collectives: Collectives, replica_of: Replicas
) -> Groups:
    """Sorts each group by the number of exchanges before an op in its program."""
    seen: dict[int, set[Any]] = collections.defaultdict(set)
    behind = {}
    for op in ops:
        if op in collectives:
            seen[replica_of[op]] |= exchange_names(collectives[op])
        behind[op] = len(seen[replica_of[op]])
    return {of: sorted(group, key=behind.__getitem__) for of, group in groups.items()}


def _edges_in_replicas(groups: Groups, replica_of: Replicas) -> Iterator[Edge]:
    """The order of each replica's program, for each resource."""
    for group in groups.values():
        last: dict[int, tf.Operation] = {}
        for op in group:
            before = last.get(replica_of[op])
            if before is not None:
                yield before, op
            last[replica_of[op]] = op


def _edges_of_tensorflow(ops: Ops, but: Collection[Any]) -> Iterator[Edge]:
    """TensorFlow's automatic dependencies, except those of the resources `but`."""
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
    """`ops` by the resources they touch."""
    found: Groups = collections.defaultdict(list)
    for op in ops:
        reads, writes = touched_by(op)
        handles = [handle.ref() for handle in (*reads, *writes)]
        for handle in handles or ([None] if has_effects(op) else []):
            found[handle].append(op)
    return found


def _leave_behind(last: Ops, handle: Any) -> None:
    """Makes TensorFlow order ops that are built later after `last`."""
    with tf.control_dependencies(last):
        if handle is None:
            tf.debugging.Assert(True, [""])
        else:
            tf.identity(handle.deref())


def collectives_of(ops: Ops, replica_of: Replicas) -> Collectives:
    """The members of `ops`, in the order of building, that take part in exchanges: an
    op waits for ops of other replicas, which is no edge of the graph.

    A called function or a conditional takes part in all exchanges within it. If it is
    called twice, the first call of one replica pairs with the first of another.
    """
    known: dict[int, Names] = {}
    times: collections.Counter[Any] = collections.Counter()
    found = {}
    for op in ops:
        names = _names_of(op, known)
        if not any(names):
            continue
        replica = replica_of[op]
        sends, awaits = (
            {(name, times[replica, side, name]) for name in some}
            for side, some in enumerate(names)
        )
        times.update(
            (replica, side, name) for side, some in enumerate(names) for name in some
        )
        found[op] = sends, awaits
    return found


def _names_of(op: tf.Operation, known: dict[int, Names]) -> Names:
    if op.type in ("Send", "Recv"):
        name = op.get_attr("tensor_name").decode()
        return ({name}, set()) if op.type == "Send" else (set(), {name})
    if op.type.startswith("Collective") and len(op.inputs) > 3:
        # An unknown key is a size; the group's key belongs to this exchange alone.
        name = tuple(repr(tf.get_static_value(key)) for key in op.inputs[2:4])
        return {name}, {name}
    sends: set[Any] = set()
    awaits: set[Any] = set()
    for graph in graphs_called(op):
        if id(graph) not in known:
            known[id(graph)] = set(), set()
            inner = [_names_of(one, known) for one in graph.get_operations()]
            known[id(graph)] = (
                set().union(*(some for some, _ in inner)),
                set().union(*(some for _, some in inner)),
            )
        sends |= known[id(graph)][0]
        awaits |= known[id(graph)][1]
    return sends, awaits


def exchange_names(sides: Names) -> set[Any]:
    """The names of the exchanges of an op, equal on all replicas."""
    # A point-to-point exchange has several names, below its own.
    return {
        (tuple(name.split("/")[:3]) if isinstance(name, str) else name, time)
        for names in sides
        for name, time in names
    }


def levels_of(
    ops: Ops, collectives: Collectives, edges: Collection[Edge]
) -> dict[tf.Operation, int]:
    """The largest number of exchanges on any path to each of `ops`, of one graph and
    these edges. Ops that wait for themselves (a cycle) are left out."""
    inside = set(ops)
    behind = collections.defaultdict(list)
    for first, second in edges:
        behind[second].append(first)
    sending = collections.defaultdict(list)
    for op, (sends, _) in collectives.items():
        for name in sends:
            sending[name].append(op)

    def begins_after(op: tf.Operation) -> Iterator[Any]:
        given = (tensor.op for tensor in op.inputs)
        for before in (*given, *op.control_inputs, *behind[op]):
            if before in inside:
                yield before, "ends"

    def ends_after(op: tf.Operation) -> Iterator[Any]:
        yield op, "begins"
        for name in collectives.get(op, ((), ()))[1]:
            for other in sending[name]:
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
        if what == "ends" and op in collectives:
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


def operations() -> list[tf.Operation]:
    """All operations of the graph being built, in the order of building."""
    return tf.compat.v1.get_default_graph().get_operations()


class ReplicaPlaces:
    """Attributes operations to replicas by when and where they were built."""

    def __init__(self) -> None:
        self._begun: list[int] = []
        self._ended: list[int] = []
        self._scopes: list[str] = []

    def seen(self, replica: Callable) -> Callable:
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
        return len(self._begun)

    def of(self, ops: Ops, first: int) -> Replicas:
        """The replica of each of `ops`, numbered from `first`. Replicas that took turns
        (`merge_call`) have name scopes; the first one shares its own with other ops."""
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


def warn_about_shared(step: Step, shared: Mapping[Any, Ops]) -> None:
    """Warns of variables made outside of the scope, which each replica updates."""
    for handle, group in shared.items():
        found = [what for op in group if (what := _problem_of(step, op))]
        if len(found) < 2:
            continue  # nothing, or one replica acts for all
        # Only the printed form of a handle has the variable's name.
        printed = str(outermost(handle.deref()))
        named = re.search(r'name="([^"]*?)(/\d+)?"', printed)
        step.state_suspicions.add(
            f"the variable {named[1] if named else handle.deref().name!r}, which was "
            f"not made in strategy.scope(), {found[0]}. Make it in strategy.scope(): "
            "then each replica has its own, and tfdp combines them"
        )


def _problem_of(step: Step, op: tf.Operation) -> str | None:
    if adds_to_variable(op):
        # The replicas' sums over rows add up correctly; a count of steps does not.
        change = tf.get_static_value(op.inputs[1])
        is_count = change is not None and change.shape == () and abs(change) == 1
        return (
            f"is counted up by each of {step.replicas} replicas" if is_count else None
        )
    if not assigns(op) or len(op.inputs) != 2:
        return None
    handle, value = op.inputs
    if is_extreme(value.op):
        return None  # idempotent
    found = [trace.analysis.value(value) for trace in step.traces]
    own = handle_of(handle)
    if any(own == read for each in found for read, _ in each.reads):
        return (
            f"is assigned by each of {step.replicas} replicas from its previous value"
        )
    if any(each.is_of_replica for each in found):
        return "keeps the last replica's value of its own rows"
    return None
