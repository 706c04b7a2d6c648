"""The graph of a training step, traced and not run, as a `StepGraph`."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.step_ops import called_graph, is_compiled_by_xla, is_resource
from tfdp.planning.liveness import run_in_thought
from tfdp.planning.loops import kept_bytes_per_turn, turns_of
from tfdp.planning.op_rules import (
    Tensor,
    flops_of,
    reused_inputs,
    shared_input,
)
from tfdp.planning.scratch import scratch_bytes_of
from tfdp.planning.step_graph import COMPILED, ENDLESS, Op, StepGraph, StoredVariable

__all__ = ["read_graph"]

CALLS = frozenset("PartitionedCall StatefulPartitionedCall".split())
BRANCHES = {
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
}
LOOPS = frozenset("While StatelessWhile".split())
ADDS = frozenset(
    "AssignAddVariableOp AssignSubVariableOp ResourceScatterAdd ResourceScatterSub "
    "ResourceScatterUpdate".split()
)
# What has its memory elsewhere: the batch, which stands among the variables.
GIVEN = frozenset("Placeholder".split())
CONSTANT = "Const"
# Of no known shape and no size: shapes, and what a GPU keeps of a batch normalization.
SMALL = frozenset(
    "BroadcastGradientArgs FusedBatchNormGradV3 FusedBatchNormV3 Shape".split()
)

# A tensor's place in the step: (op, output).
Place = tuple[int, int]


def read_graph(
    graph: Any,
    variables: Mapping[int, tuple[int, StoredVariable]],
    batch_bytes: int = 0,
    weight_shapes: Collection[tuple[int, ...]] = (),
) -> StepGraph:
    """The step as plain values.

    Args:
      graph: of a concrete function.
      variables: for each variable that the function captured, by the `id` of its
        handle: its place, and what it is.
      batch_bytes: of what the function is given, which lives as long as it runs.
      weight_shapes: of the trainable weights, by which their gradients are known.

    Returns:
      The step; ops that nothing needs are left out, as TensorFlow leaves them out.
    """
    stored = [stored for _, stored in sorted(variables.values(), key=_place)]
    stored.append(StoredVariable(batch_bytes, "batch"))
    reader = _Reader(stored, weight_shapes)
    handles = {
        inner.op.name: variables[id(outer)][0]
        for outer, inner in graph.captures
        if id(outer) in variables
    }
    results = reader.read(graph, {}, handles, _needed(graph))
    return StepGraph(
        tuple(reader.ops),
        tuple(reader.variables),
        tuple(place for place in results if place is not None),
        dict(reader.notes),
    )


def _place(item: tuple[int, StoredVariable]) -> int:
    return item[0]


def _needed(graph: Any) -> set[str]:
    """The names of the ops that the function's results, or its effects, need."""
    stack = [tensor.op for tensor in graph.outputs] + list(graph.control_outputs)
    seen: set[str] = set()
    while stack:
        op = stack.pop()
        if op.name not in seen:
            seen.add(op.name)
            stack += [tensor.op for tensor in op.inputs]
            stack += op.control_inputs
    return seen


class _Reader:
    """Reads graphs into one list of ops."""

    def __init__(
        self,
        variables: Sequence[StoredVariable],
        weight_shapes: Collection[tuple[int, ...]] = (),
    ):
        self.variables = list(variables)
        self._weight_shapes = frozenset(weight_shapes)
        self.ops: list[Op] = []
        self.notes: collections.Counter[str] = collections.Counter()
        self._sent: dict[str, Place] = {}

    def read(
        self,
        graph: Any,
        given: dict[str, Place | None],
        handles: dict[str, int],
        needed: set[str],
    ) -> list[Place | None]:
        """Adds the ops of `graph`; returns the places of its outputs.

        Args:
          graph: of a function.
          given: places of its inputs, by the names of their ops.
          handles: variables among its inputs, likewise.
          needed: names of the ops to add.
        """
        places: dict[tuple[str, int], Place | None] = {}
        # The op that ends last of those that stand for one; a call has several.
        ends: dict[str, list[int]] = {}
        handles = dict(handles)
        for op in _in_order(graph, needed):
            controls = sorted(
                end for c in op.control_inputs for end in ends.get(c.name, ())
            )
            if op.name in given:
                places[op.name, 0] = given[op.name]
                ends[op.name] = []
                continue
            if op.type == "Identity" and is_resource(op.inputs[0]):
                source = op.inputs[0].op.name
                if source in handles:
                    handles[op.name] = handles[source]
            inputs = [
                places.get((tensor.op.name, tensor.value_index)) for tensor in op.inputs
            ]
            if op.type in CALLS and (inner := called_graph(op, "f")) is not None:
                self._call(op, inner, inputs, controls, places, ends, handles)
                continue
            place = len(self.ops)
            self.ops.append(self._op(op, inputs, controls, handles))
            ends[op.name] = [place]
            for number in range(len(op.outputs)):
                places[op.name, number] = (place, number)
        return [places.get((t.op.name, t.value_index)) for t in graph.outputs]

    def _call(
        self,
        op: Any,
        inner: Any,
        inputs: list[Place | None],
        controls: list[int],
        places: dict[tuple[str, int], Place | None],
        ends: dict[str, list[int]],
        handles: dict[str, int],
    ) -> None:
        """A function's ops stand in the place of its call, as the optimizer does."""
        if is_compiled_by_xla(op):
            self.notes[COMPILED] += 1
        first = len(self.ops)
        given = {
            parameter.op.name: place
            for parameter, place in zip(inner.inputs, inputs, strict=True)
        }
        inner_handles = {
            parameter.op.name: handles[tensor.op.name]
            for parameter, tensor in zip(inner.inputs, op.inputs, strict=True)
            if tensor.op.name in handles
        }
        results = self.read(inner, given, inner_handles, _needed(inner))
        for number, result in enumerate(results):
            places[op.name, number] = result
        if controls:
            for place in range(first, len(self.ops)):
                before = self.ops[place]
                if not before.inputs or before.variable is not None:
                    self.ops[place] = _with_controls(before, controls)
        ends[op.name] = list(range(first, len(self.ops)))

    def _op(
        self,
        op: Any,
        inputs: list[Place | None],
        controls: list[int],
        handles: dict[str, int],
    ) -> Op:
        read = [_tensor(tensor) for tensor in op.inputs]
        made = [_tensor(tensor) for tensor in op.outputs]
        kept = [i for i, place in enumerate(inputs) if place is not None]
        renumbered = {old: new for new, old in enumerate(kept)}
        variable, access = self._access(op, handles)
        shares: list[int | None] = []
        for number in range(len(made)):
            shared = shared_input(op.type, read, made, number)
            shares.append(None if shared is None else renumbered.get(shared))
        transposes = op.type == "MatMul" and op.get_attr("transpose_a")
        if op.type in ("BatchMatMulV2", "BatchMatMul"):
            transposes = op.get_attr("adj_x")
        own_inputs = [place for place in inputs if place is not None]
        if op.type in ("Send", "_Send"):
            self._sent[op.get_attr("tensor_name").decode()] = own_inputs[0]
        elif op.type in ("Recv", "_Recv"):
            source = self._sent.get(op.get_attr("tensor_name").decode())
            if source is not None:
                own_inputs, shares = [source], [0]
        return Op(
            kind=op.type,
            inputs=tuple(own_inputs),
            controls=tuple(controls),
            output_bytes=tuple(
                self._size_of(op, number, read, made) for number in range(len(made))
            ),
            shares=tuple(shares),
            reuses=tuple(
                renumbered[i] for i in reused_inputs(op.type, read) if i in renumbered
            ),
            variable=variable,
            access=access,
            scratch_bytes=scratch_bytes_of(op.type, read, made, _equation_of(op))
            + self._inside_bytes(op),
            flops=flops_of(op.type, read, made, bool(transposes))
            + self._inside_flops(op),
            part=self._part_of(op),
            name=op.name,
        )

    def _access(self, op: Any, handles: dict[str, int]) -> tuple[int | None, str]:
        if not op.inputs or op.inputs[0].dtype != tf.resource:
            return None, ""
        variable = handles.get(op.inputs[0].op.name)
        if variable is None:
            return None, ""
        if op.type == "ReadVariableOp":
            return variable, "read"
        if op.type == "AssignVariableOp":
            return variable, "assign"
        return (variable, "add") if op.type in ADDS else (None, "")

    def _size_of(
        self, op: Any, number: int, read: Sequence[Tensor], made: Sequence[Tensor]
    ) -> int:
        tensor = made[number]
        if op.type in LOOPS and (body := called_graph(op, "body")) is not None:
            kept = kept_bytes_per_turn(body, number) * (turns_of(op) or 1)
            return max(kept, tensor.size_bytes)
        if op.type in GIVEN or op.type == CONSTANT:
            return 0
        if tensor.shape is not None or not tensor.element_bytes:
            return tensor.size_bytes
        if op.type in SMALL:
            return 0
        self.notes["tensors whose shape is not known before the step runs"] += 1
        return max((t.size_bytes for t in read), default=0)

    def _inside_bytes(self, op: Any) -> int:
        """The most that the branches of a conditional, or the turn of a loop, need."""
        attributes: tuple[str, ...] = BRANCHES.get(op.type, ())
        if op.type in LOOPS:
            attributes = ("body",)
            if turns_of(op) is None:
                self.notes[ENDLESS] += 1
        peaks = [0]
        for attribute in attributes:
            inner = called_graph(op, attribute)
            if inner is not None:
                reader = _Reader([])
                reader.read(inner, {}, {}, _needed(inner))
                peaks.append(run_in_thought(StepGraph(tuple(reader.ops))).peak_bytes)
        return max(peaks)

    def _part_of(self, op: Any) -> str:
        if "tfdp_all" in op.name or "tfdp_reduce" in op.name:
            return "exchange"
        if "gradient_tape" in op.name and op.outputs:
            shape = op.outputs[0].shape
            known = tuple(shape.as_list()) if shape.rank else None
            return "gradients" if known in self._weight_shapes else "activations"
        return "update" if "/update_" in op.name else "activations"

    def _inside_flops(self, op: Any) -> float:
        """Of all turns of a loop; of the branches of a conditional together."""
        attributes = ("body",) if op.type in LOOPS else BRANCHES.get(op.type, ())
        total = 0.0
        for attribute in attributes:
            if (inner := called_graph(op, attribute)) is not None:
                reader = _Reader([])
                reader.read(inner, {}, {}, _needed(inner))
                total += sum(inside.flops for inside in reader.ops)
        return total * ((turns_of(op) or 1) if op.type in LOOPS else 1)


def _with_controls(op: Op, controls: Sequence[int]) -> Op:
    return dataclasses.replace(op, controls=(*op.controls, *controls))


def _in_order(graph: Any, needed: set[str]) -> list[Any]:
    """The needed ops, each after what it reads; a `Recv` after its `Send`."""
    ops = {op.name: op for op in graph.get_operations() if op.name in needed}
    senders = {
        op.get_attr("tensor_name"): op
        for op in ops.values()
        if op.type in ("Send", "_Send")
    }

    turn = {name: number for number, name in enumerate(ops)}

    def before(op: Any) -> list[Any]:
        found = [tensor.op for tensor in op.inputs]
        # TensorFlow lists them in another order each time.
        found += sorted(op.control_inputs, key=lambda op: turn.get(op.name, -1))
        if op.type in ("Recv", "_Recv"):
            sender = senders.get(op.get_attr("tensor_name"))
            found += [sender] if sender is not None else []
        return [source for source in found if source.name in ops]

    ordered: list[Any] = []
    done: set[str] = set()
    for start in ops.values():
        stack = [(start, iter(before(start)))] if start.name not in done else []
        opened = {start.name}
        while stack:
            op, sources = stack[-1]
            source = next((s for s in sources if s.name not in done), None)
            if source is None:
                stack.pop()
                done.add(op.name)
                ordered.append(op)
            elif source.name not in opened:
                opened.add(source.name)
                stack.append((source, iter(before(source))))
    return ordered


def _tensor(tensor: Any) -> Tensor:
    shape = tensor.shape
    dims = tuple(shape.as_list()) if shape.rank is not None else None
    if dims is not None and None in dims:
        dims = None
    if is_resource(tensor) or tensor.dtype == tf.string:
        return Tensor((), 0)
    return Tensor(dims, tensor.dtype.size)


def _equation_of(op: Any) -> str:
    return op.get_attr("equation").decode() if op.type == "Einsum" else ""
