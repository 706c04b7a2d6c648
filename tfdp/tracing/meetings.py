"""Where the replicas of a step meet, told from its graph.

An operation that takes part in an exchange waits for those of other replicas that do,
which is no edge of the graph.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdp._private.step_ops import graphs_called

__all__ = ["Edge", "Meeting", "exchanges_of", "levels_of", "meetings_of"]

#: An operation, and one that runs behind it.
Edge: TypeAlias = tuple[tf.Operation, tf.Operation]
# The names of what an operation brings to exchanges, and of what it waits for.
Names: TypeAlias = tuple[set[Any], set[Any]]
#: The same, each with how often the replica has had it before.
Meeting: TypeAlias = tuple[set[Any], set[Any]]


def meetings_of(
    ops: Sequence[tf.Operation], replica_of: Mapping[tf.Operation, int]
) -> dict[tf.Operation, Meeting]:
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


def exchanges_of(meeting: Meeting) -> set[Any]:
    """The exchanges that an operation takes part in: names, alike on all replicas."""
    # Where replicas hand tensors over one exchange has several names, below its own.
    return {
        (tuple(name.split("/")[:3]) if isinstance(name, str) else name, time)
        for names in meeting
        for name, time in names
    }


def levels_of(
    ops: Sequence[tf.Operation],
    meetings: dict[tf.Operation, Meeting],
    edges: Collection[Edge],
) -> dict[tf.Operation, int]:
    """How many exchanges lie before each of `ops`, at most, on any way to it.

    Args:
      ops: of one graph.
      meetings: see `meetings_of`.
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
