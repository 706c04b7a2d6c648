"""Walks a traced step once, forward, and keeps the value of each tensor.

`Analysis.value(tensor)` computes what is not known yet of the graphs behind `tensor`,
each op once: of called functions once for each combination of arguments, of loops until
nothing changes. Gradients are not walked: the tape registers what each is of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.names import whole_of
from tfdp._private.step_ops import MAY_CALL, graphs_called, names_called, only_called
from tfdp.lint.op_kinds import is_call, is_conditional, is_loop
from tfdp.lint.registry import (
    GradientOf,
    ShareOf,
    Statement,
    is_of_graph,
    key_of,
    registered,
    stored_before,
)
from tfdp.lint.rules import RULES, Node, unlisted
from tfdp.lint.terms import handle_of
from tfdp.lint.values import (
    JOINED,
    LOCAL_TERMS,
    NORMALIZED,
    PAIRED,
    REPLICATED,
    SAME,
    UNKNOWN,
    Term,
    Value,
    dependencies,
    gradient_of,
    joined,
    reads_of,
    share_of,
    times,
    unknown,
)

# Rounds after which the values of a loop are given up.
MOST_ROUNDS = 5


class _Frame:
    """A graph, and the values of its arguments; None: those of the surrounding graph,
    which is being built."""

    def __init__(self, graph: Any, given: Sequence[Value] | None = None):
        self.graph = graph
        #: By the names of ops: the values of their outputs.
        self.values: dict[str, list[Value]] = {}
        self.given: dict[str, Value] = {}
        if given is not None:
            names = [tensor.op.name for tensor in graph.inputs]
            self.given = dict(zip(names, given, strict=False))
        self.is_open = given is None
        self._outer: dict[str, tf.Tensor] = {}

    def has(self, op: tf.Operation) -> bool:
        """Whether all outputs have values; taking a gradient adds some to a call."""
        return len(self.values.get(op.name, ())) == len(op.outputs) and (
            op.name in self.values
        )

    def captured(self, placeholder: str) -> tf.Tensor | None:
        """The tensor of the surrounding graph that an open graph has captured."""
        if placeholder not in self._outer:
            captures = getattr(self.graph, "captures", ())
            self._outer = {inner.op.name: outer for outer, inner in captures}
        return self._outer.get(placeholder)


class Analysis:
    """The values of one replica's tensors.

    Args:
      sources: by `key_of`: the values of tensors that the replica was given.
      rows: the static number of its rows; None: dynamic.
      replicas: the number of replicas.
    """

    def __init__(
        self, sources: dict[Any, Value], rows: int | None = None, replicas: int = 1
    ) -> None:
        self.sources = sources
        self.rows, self.replicas = rows, replicas
        self._open: dict[int, _Frame] = {}
        self._closed: dict[Any, list[Value]] = {}

    def value(self, tensor: tf.Tensor) -> Value:
        """The value of a tensor; of one outside of graphs nothing is known."""
        if not is_of_graph(tensor):
            return _of_concrete(tensor)
        frame = self._open_frame(tensor.graph)
        self._compute(frame, [tensor])
        return self._known(frame, tensor)

    def _open_frame(self, graph: Any) -> _Frame:
        if id(graph) not in self._open:
            self._open[id(graph)] = _Frame(graph)
        return self._open[id(graph)]

    def _known(self, frame: _Frame, tensor: tf.Tensor) -> Value:
        return frame.values[tensor.op.name][tensor.value_index]

    def _stated(self, frame: _Frame, op: tf.Operation) -> list[Statement | None]:
        """The statements about an op's outputs; None for an output without one."""
        stated = registered(frame.graph)
        names = [output.name for output in op.outputs]
        found = [self.sources.get((id(frame.graph), name)) for name in names]
        return [
            stated.get(name) if source is None else source
            for name, source in zip(names, found, strict=True)
        ]

    def _compute(self, frame: _Frame, tensors: Sequence[tf.Tensor]) -> None:
        """Computes the values of `tensors`, and what they need, without recursion."""
        # With the values stated of an op's outputs once all that it needs is on top.
        todo: list[tuple[_Frame, tf.Operation, list[Statement | None] | None]]
        todo = [(frame, tensor.op, None) for tensor in tensors]
        waiting: set[tuple[int, str]] = set()
        while todo:
            at, op, stated = todo.pop()
            if at.has(op):
                continue
            if stated is None:
                stated = self._stated(at, op)
                waiting.add((id(at), op.name))
                needed: list[Any] = []
                for there, tensor in self._needs(at, op, stated):
                    if there.has(tensor.op):
                        continue
                    if (id(there), tensor.op.name) in waiting:
                        # A statement about the tensor refers to the tensor itself,
                        # as a tf.autodiff.ForwardAccumulator makes them.
                        _give_up(there, tensor.op)
                    else:
                        needed.append((there, tensor.op, None))
                if needed:
                    todo += [(at, op, stated), *needed]
                    continue
            found, before = self._of_op(at, op, stated), at.values.get(op.name, [])
            at.values[op.name] = [*before, *found[len(before) :]]

    def _needs(
        self, frame: _Frame, op: tf.Operation, stated: Sequence[Statement | None]
    ) -> list[tuple[_Frame, tf.Tensor]]:
        if stated and all(isinstance(each, Value) for each in stated):
            return []
        others = [one for each in stated for one in _tensors_of(each)]
        needed = [(self._frame_of(frame, one), one) for one in others]
        if stated and all(each is not None for each in stated):
            return needed
        if op.type == "Placeholder":
            if not frame.is_open:
                return []
            outer: Any = frame.captured(op.name)
            given = self._calls_of(op) if outer is None else [outer]
            given = [one for one in given if is_of_graph(one)]
            return [*needed, *((self._open_frame(one.graph), one) for one in given)]
        if op.type == "ReadVariableOp" and (stored := stored_before(op)) is not None:
            needed.append((frame, stored))
        return [*needed, *((frame, tensor) for tensor in op.inputs)]

    def _of_op(
        self, frame: _Frame, op: tf.Operation, stated: Sequence[Statement | None]
    ) -> list[Value]:
        if stated and all(each is not None for each in stated):
            return [self._of_statement(frame, each) for each in stated]
        if op.type == "Placeholder":
            found = [self._of_argument(frame, op)]
        else:
            found = self._by_rule(frame, op)
        for place, each in enumerate(stated):
            if each is not None:
                found[place] = self._of_statement(frame, each)
        return found

    def _frame_of(self, frame: _Frame, tensor: tf.Tensor) -> _Frame:
        is_here = tensor.graph is frame.graph
        return frame if is_here else self._open_frame(tensor.graph)

    def _of_statement(self, frame: _Frame, stated: Statement) -> Value:
        if isinstance(stated, Value):
            return stated
        values = [
            self._known(self._frame_of(frame, one), one) for one in _tensors_of(stated)
        ]
        for place, one in enumerate(_tensors_of(stated)):
            if len(values[place].axes) > 1 and isinstance(stated, ShareOf):
                values[place] = values[place].crossed(PAIRED, one.op.name)
        if isinstance(stated, ShareOf):
            return share_of(values)
        if not isinstance(stated, GradientOf):
            return values[0]
        count, weighted = len(stated.targets), len(stated.weights)
        targets, weights = values[:count], values[count : count + weighted]
        if weights:  # as the gradient of the sum of their products
            pairs = zip(targets, weights, strict=True)
            targets = [times(one, other, "gradient") for one, other in pairs]
        source = values[-1] if stated.source is not None else None
        handle = None if stated.handle is None else handle_of(stated.handle)
        return gradient_of(targets, source, handle)

    def _of_argument(self, frame: _Frame, op: tf.Operation) -> Value:
        if op.name in frame.given:
            return frame.given[op.name]
        outer = frame.captured(op.name) if frame.is_open else None
        if outer is None:
            calls = self._calls_of(op)
            if calls:
                frames = [self._open_frame(one.graph) for one in calls]
                return joined(map(self._known, frames, calls))
            is_handle = op.outputs[0].dtype == tf.resource
            return _of_handle(op.outputs[0]) if is_handle else UNKNOWN
        if is_of_graph(outer):
            return self._known(self._open_frame(outer.graph), outer)
        return _of_concrete(outer)

    def _calls_of(self, op: tf.Operation) -> list[tf.Tensor]:
        """Tensors that the surrounding graph passes for a finished function's input."""
        graph, found = op.graph, []
        outer = getattr(graph, "outer_graph", None)
        if not hasattr(graph, "captures") or outer is None:
            return []
        place = [tensor.op.name for tensor in graph.inputs].index(op.name)
        for call in outer.get_operations():
            if only_called(call) is graph:
                found.append(call.inputs[place])
        return [one for one in found if is_of_graph(one)]

    def _by_rule(self, frame: _Frame, op: tf.Operation) -> list[Value]:
        values = [self._known(frame, tensor) for tensor in op.inputs]
        if op.type in MAY_CALL:
            return self._of_call(op, values)
        if not op.outputs:
            return []
        if op.type == "ReadVariableOp" and (stored := stored_before(op)) is not None:
            last = self._known(frame, stored)
            # Others are the same on all replicas, or parts of a sum that goes on.
            if last.is_of_own_rows and last.target is None and not last.of_share:
                return [last]
        node = Node(op, values, self.rows, self.replicas)
        found = RULES.get(op.type, unlisted)(node)
        count = len(op.outputs)
        return _told_where_lost(
            op, found if isinstance(found, list) else [found] * count
        )

    def _of_call(self, op: tf.Operation, values: list[Value]) -> list[Value]:
        graphs = list(graphs_called(op))
        count = len(op.outputs)
        taken = len(values) - is_conditional(op)
        is_whole = all(
            len(graph.inputs) == taken and len(graph.outputs) == count
            for graph in graphs[is_loop(op) :]  # not the condition
        )
        if len(graphs) < len(list(names_called(op))) or not is_whole:
            # A function's graph may be another one than that which gradients call.
            return _told_where_lost(op, [unknown(values)] * count)
        if is_loop(op):
            return _told_where_lost(op, self._of_loop(op, graphs, values))
        if is_call(op):
            return self._outputs(graphs[0], values)
        condition, *given = values
        branches = [self._outputs(graph, given) for graph in graphs]
        found = []
        for each in zip(*branches, strict=True):
            either = joined(each)
            changes = dependencies([either, condition])
            changes["cross"], changes["of_share"] = either.cross, either.of_share
            reads = reads_of([either], SAME)
            chosen = either.but(**changes, reads=reads)
            found.append(_decided_by(condition, chosen, op.name))
        return found

    def _of_loop(self, op: Any, graphs: Any, values: list[Value]) -> list[Value]:
        condition, body = graphs
        for _ in range(MOST_ROUNDS):
            after = self._outputs(body, values)
            after = [
                self._carried(body, place, value) for place, value in enumerate(after)
            ]
            wider = [joined(pair) for pair in zip(values, after, strict=True)]
            if wider == values:
                goes_on = self._outputs(condition, values)[0]
                return [_decided_by(goes_on, value, op.name) for value in values]
            values = wider
        return [unknown([value]) for value in values]

    def _carried(self, body: Any, place: int, value: Value) -> Value:
        """The value that a loop over rows carries from one row to the next."""
        is_changed = outermost_in(body.outputs[place]) is not body.inputs[place]
        if value.is_one_row and is_changed:
            return value.crossed(JOINED, body.outputs[place].op.name)
        return value

    def _outputs(self, graph: Any, given: Sequence[Value]) -> list[Value]:
        # A gradient adds outputs to the graph of a function.
        key = id(graph), len(graph.outputs), tuple(given)
        if key not in self._closed:
            frame = _Frame(graph, given)
            self._compute(frame, graph.outputs)
            self._closed[key] = [self._known(frame, one) for one in graph.outputs]
        return self._closed[key]


def _decided_by(condition: Value, value: Value, op: str) -> Value:
    """The value after a branch or a loop; crossed if all rows decide how it runs."""
    is_decision = condition.terms & (LOCAL_TERMS - {Term.ROWS})
    if is_decision and value.is_of_replica and not value.of_share:
        return value.crossed(NORMALIZED, op)
    return value


def _told_where_lost(op: tf.Operation, values: list[Value]) -> list[Value]:
    """`values` of an op, with its name where the analysis ends at it."""
    here = frozenset({f"{op.type} {op.name}"})
    return [
        value.but(lost=here)
        if Term.UNKNOWN in value.terms and value.is_telling and not value.lost
        else value
        for value in values
    ]


def _give_up(frame: _Frame, op: tf.Operation) -> None:
    lost = UNKNOWN.but(lost=frozenset({f"{op.type} {op.name}"}))
    frame.values.setdefault(op.name, [lost] * len(op.outputs))


def _of_concrete(tensor: Any) -> Value:
    return _of_handle(tensor) if tensor.dtype == tf.resource else REPLICATED


def _of_handle(handle: tf.Tensor) -> Value:
    """A variable's handle: what is read from it."""
    whole = whole_of(handle)
    reason = getattr(type(whole), "differs_by_replica", None)
    local = frozenset(() if reason is None else (reason,))
    if whole is not None and whole.trainable:
        return REPLICATED.but(local=local)  # a step assigns none of these
    return REPLICATED.but(reads=frozenset({(key_of(handle), SAME)}), local=local)


def outermost_in(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that identities hand on within a graph."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _tensors_of(stated: Statement | None) -> tuple[tf.Tensor, ...]:
    if isinstance(stated, GradientOf):
        return stated.tensors
    if isinstance(stated, ShareOf):
        return stated.made_of
    return (stated,) if is_of_graph(stated) else ()  # type: ignore[return-value]
