"""Converts the graph of a traced training step into a `StepGraph`."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.step_ops import (
    PYTHON,
    called_graph,
    given_to,
    is_compiled_by_xla,
    is_resource,
    only_called,
)
from tfdp.exchange import op_names
from tfdp.tools.planning.any_rows import AnyRows
from tfdp.tools.planning.liveness import OF_LINKS, dry_run, variables_in_link_buffers
from tfdp.tools.planning.op_rules import (
    Tensor,
    access_of,
    flops_of,
    most_bytes,
    reused_inputs,
    scratch_bytes_of,
    shared_input,
)
from tfdp.tools.planning.step_graph import (
    COMPILED,
    ENDLESS,
    Op,
    Place,
    StepGraph,
    StoredVariable,
)

LOOPS = frozenset("While StatelessWhile".split())
# Memory counted elsewhere: the batch is one of the variables.
ELSEWHERE = frozenset("Const Placeholder".split())
# Unknown shape but negligible size: shapes, and a GPU's batch-normalization reserve.
SMALL = frozenset(
    "BroadcastGradientArgs FusedBatchNormGradV3 FusedBatchNormV3 Shape".split()
)


def read_graph(
    graph: Any,
    variables: Mapping[int, tuple[int, StoredVariable]],
    batch_bytes: int = 0,
    weight_shapes: Collection[tuple[int, ...]] = (),
    hosts: int = 1,
    host_device: str = "",
    rows: AnyRows | None = None,
) -> StepGraph:
    """Converts `graph`; ops that nothing needs are left out, as TensorFlow prunes them.

    Args:
      graph: of a concrete function.
      variables: by `id` of the captured handle, each variable's place and description.
      batch_bytes: of the function's inputs, which live as long as it runs.
      weight_shapes: of the trainable weights; identify their gradients.
      hosts: that train together; each contributes equally many rows of an embedding.
      host_device: suffix of the device name whose memory is the host's; "": none.
      rows: converts to another row count; raises UnclearLength if that is ambiguous.
    """
    stored = [stored for _, stored in sorted(variables.values(), key=lambda v: v[0])]
    stored.append(StoredVariable(batch_bytes, "batch"))
    reader = _Reader(stored, weight_shapes, hosts, host_device, rows)
    handles = {
        inner.op.name: variables[id(outer)][0]
        for outer, inner in graph.captures
        if id(outer) in variables
    }
    results = reader.read(graph, {}, handles, needed_ops(graph))
    reader.pairs.connect(reader.ops)
    ops = tuple(reader.ops)
    return StepGraph(
        ops,
        tuple(reader.variables),
        tuple(place for place in results if place is not None),
        dict(reader.notes),
        variables_in_link_buffers(ops, reader.variables),
    )


class _Reader:
    """Reads graphs into one list of ops."""

    def __init__(
        self,
        variables: Sequence[StoredVariable],
        weight_shapes: Collection[tuple[int, ...]] = (),
        hosts: int = 1,
        host_device: str = "",
        rows: AnyRows | None = None,
    ):
        self.variables = list(variables)
        self._rows = rows
        self._hosts = hosts
        self._host_device = host_device
        # Device of the call being read, for ops that name none; names of the calls.
        self._device = self._caller = ""
        self._weight_shapes = frozenset(weight_shapes)
        self.ops: list[Op] = []
        self.notes: collections.Counter[str] = collections.Counter()
        self.pairs = SendReceivePairs()

    def read(
        self,
        graph: Any,
        given: dict[str, Place | None],
        handles: dict[str, int],
        needed: set[str],
    ) -> list[Place | None]:
        """Adds the needed ops of `graph`; returns the places of its outputs.

        `given`: places of its inputs by op name; `handles`: variables, likewise.
        """
        places: dict[tuple[str, int], Place | None] = {}
        # Last op of each group that replaces one op; a call has several.
        ends: dict[str, list[int]] = {}
        handles = dict(handles)
        for op in in_order(graph, needed):
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
            inner = only_called(op)
            # Compression is element-wise: XLA fuses it into one loop.
            is_fused = op_names.COMPRESSED_SUM in op.name and is_compiled_by_xla(op)
            if inner is not None and not is_fused:
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
        """Inlines a function's ops instead of its call, as the optimizer does."""
        if is_compiled_by_xla(op):
            self.notes[COMPILED] += 1
        first = len(self.ops)
        given = {
            parameter.op.name: place
            for parameter, place in zip(
                inner.inputs, given_to(inner, inputs), strict=True
            )
        }
        inner_handles = {
            parameter.op.name: handles[tensor.op.name]
            for parameter, tensor in zip(
                inner.inputs, given_to(inner, op.inputs), strict=True
            )
            if tensor.op.name in handles
        }
        outside = self._device, self._caller
        self._device, self._caller = op.device or self._device, f"{outside[1]}{op.name}"
        results = self.read(inner, given, inner_handles, needed_ops(inner))
        self._device, self._caller = outside
        self._add_controls(first, controls)
        ends[op.name] = list(range(first, len(self.ops)))
        for number, result in enumerate(results):
            places[op.name, number] = result

    def _add_controls(self, first: int, controls: Sequence[int]) -> None:
        """Makes ops from `first` on without inputs wait for `controls`."""
        for place in range(first, len(self.ops)) if controls else ():
            op = self.ops[place]
            if not op.inputs or op.variable is not None:
                controlled = (*op.controls, *controls)
                self.ops[place] = dataclasses.replace(op, controls=controlled)

    def _op(
        self,
        op: Any,
        inputs: list[Place | None],
        controls: list[int],
        handles: dict[str, int],
    ) -> Op:
        read = [self._tensor(tensor) for tensor in op.inputs]
        made = [self._tensor(tensor) for tensor in op.outputs]
        kept = [i for i, place in enumerate(inputs) if place is not None]
        renumbered = {old: new for new, old in enumerate(kept)}
        variable, access = self._access(op, handles)
        if op_names.LINK_CALL in op.name and op.type in PYTHON:
            variable, access = self._pooled(op, inputs, read), "read"
        shares: list[int | None] = []
        is_finite = op.type in BRANCHES and op_names.WHERE_FINITE in op.name
        for number in range(len(made)):
            shared = shared_input(op.type, read, made, number)
            if is_finite:
                shared = branch_input(op, number)
            shares.append(None if shared is None else renumbered.get(shared))
        transposes = op.type == "MatMul" and op.get_attr("transpose_a")
        if op.type in ("BatchMatMulV2", "BatchMatMul"):
            transposes = op.get_attr("adj_x")
        equation = op.get_attr("equation").decode() if op.type == "Einsum" else ""
        inner_bytes, inner_flops = self._inner_costs(op)
        own_inputs = [place for place in inputs if place is not None]
        if op.type in SENDS:
            self.pairs.send(op.get_attr("tensor_name").decode(), own_inputs[0])
        elif op.type in RECEIVES:
            name = op.get_attr("tensor_name").decode()
            source = self.pairs.receive(name, len(self.ops))
            if source is not None:
                own_inputs, shares = [source], [0]
                inputs = [source]
        return Op(
            kind=op.type,
            inputs=tuple(own_inputs),
            controls=tuple(controls),
            output_bytes=tuple(
                self._size_of(op, number, inputs) for number in range(len(made))
            ),
            shares=tuple(shares),
            reuses=tuple(
                renumbered[i] for i in reused_inputs(op.type, read) if i in renumbered
            ),
            variable=variable,
            access=access,
            scratch_bytes=scratch_bytes_of(op.type, read, made, equation)
            + (0 if is_finite else inner_bytes),
            flops=flops_of(op.type, read, made, bool(transposes)) + inner_flops,
            part=self._part_of(op),
            on_host=bool(self._host_device)
            and (op.device or self._device).endswith(self._host_device),
        )

    def _access(self, op: Any, handles: dict[str, int]) -> tuple[int | None, str]:
        if not op.inputs or op.inputs[0].dtype != tf.resource:
            return None, ""
        variable = handles.get(op.inputs[0].op.name)
        if variable is None:
            return None, ""
        access = access_of(op.type)
        return (variable, access) if access else (None, "")

    def _pooled(
        self, op: Any, inputs: Sequence[Place | None], read: Sequence[Tensor]
    ) -> int:
        """A link writes into a buffer of its own, kept for the next step.

        It is as large as the link's input, which may exceed what it returns.
        """
        made = sum(self._size_of(op, n, inputs) for n in range(len(op.outputs)))
        given = sum(tensor.size_bytes for tensor in read)
        self.variables.append(StoredVariable(max(made, given), OF_LINKS))
        return len(self.variables) - 1

    def _size_of(self, op: Any, number: int, inputs: Sequence[Place | None]) -> int:
        tensor = self._ensured_tensor(op.outputs[number])
        if op.type in LOOPS and (body := called_graph(op, "body")) is not None:
            item = kept_per_iteration(body, number)
            kept = 0 if item is None else self._tensor(item).size_bytes
            kept *= iterations_of(op) or 1
            return max(kept, tensor.size_bytes)
        if op.type in ELSEWHERE:
            return 0
        if tensor.shape is not None or not tensor.element_bytes:
            return tensor.size_bytes
        if op.type in SMALL:
            return 0
        if op.type in RECEIVES:
            return self._bytes_at(inputs[0]) if inputs else 0
        self.notes["tensors whose shape is unknown before the step runs"] += 1
        read = [self._bytes_at(place) for place in inputs if place is not None]
        if op.type in PYTHON and op_names.LINK_CALL in op.name and number < len(read):
            return self._hosts * read[number]
        if op.type == "GatherV2" and None not in op.inputs[0].shape[1:]:
            # No more rows than indices, whatever they are taken from.
            rows = read[1] // op.inputs[1].dtype.size
            return rows * math.prod(op.inputs[0].shape[1:]) * tensor.element_bytes
        return most_bytes(op.type, read)

    def _bytes_at(self, place: Place | None) -> int:
        return 0 if place is None else self.ops[place[0]].output_bytes[place[1]]

    def _inner_costs(self, op: Any) -> tuple[int, float]:
        """Peak bytes of one branch or iteration; FLOPs of all of them."""
        is_loop = op.type in LOOPS
        iterations = iterations_of(op) if is_loop else 1
        if iterations is None:
            self.notes[ENDLESS] += 1
        peak_bytes, flops = 0, 0.0
        for attribute in ("body",) if is_loop else BRANCHES.get(op.type, ()):
            if (inner := called_graph(op, attribute)) is not None:
                reader = _Reader([], hosts=self._hosts, rows=self._rows)
                reader.read(inner, {}, {}, needed_ops(inner))
                step = StepGraph(tuple(reader.ops), tuple(reader.variables))
                peak_bytes = max(peak_bytes, dry_run(step).peak_bytes)
                flops += step.flops
        return peak_bytes, flops * (iterations or 1)

    def _tensor(self, tensor: Any) -> Tensor:
        if is_resource(tensor) or tensor.dtype == tf.string:
            return Tensor((), 0)
        shape = tensor.shape
        dims = tuple(shape.as_list()) if shape.rank is not None else None
        if dims is not None and None in dims:
            dims = None
        if self._rows is not None and dims is not None:
            dims = tuple(map(self._rows.length, dims))
        return Tensor(dims, tensor.dtype.size)

    def _ensured_tensor(self, tensor: Any) -> Tensor:
        """A size only known at run time is that of the following EnsureShape."""
        known = self._tensor(tensor)
        for op in tensor.consumers() if known.shape is None else ():
            if op.type == "EnsureShape" and op.outputs[0].shape.is_fully_defined():
                return self._tensor(op.outputs[0])
        return known

    def _part_of(self, op: Any) -> str:
        if "tfdp_all" in op.name or "tfdp_reduce" in op.name:
            return "exchange"
        if "gradient_tape" in op.name and op.outputs:
            shape = op.outputs[0].shape
            known = tuple(shape.as_list()) if shape.rank else None
            return "gradients" if known in self._weight_shapes else "activations"
        is_update = "/update_" in op.name or "/update_" in self._caller
        return "update" if is_update else "activations"


#: Conditionals -> the attributes that name their branches.
BRANCHES = {
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
}


def branch_input(op: Any, number: int) -> int | None:
    """The input that the first branch of `op` returns as output `number`, or None.

    TensorFlow runs a conditional as switches, which allocate nothing.
    """
    inner = called_graph(op, BRANCHES[op.type][0])
    if inner is None:
        return None
    tensor = inner.outputs[number]
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    places = [place for place, each in enumerate(inner.inputs) if each is tensor]
    # Input 0 selects the branch.
    return places[0] + 1 if places else None


def needed_ops(graph: Any) -> set[str]:
    """The names of the ops that the function's results, or its side effects, need."""
    stack = [tensor.op for tensor in graph.outputs] + list(graph.control_outputs)
    seen: set[str] = set()
    while stack:
        op = stack.pop()
        if op.name not in seen:
            seen.add(op.name)
            stack += [tensor.op for tensor in op.inputs]
            stack += op.control_inputs
    return seen


def in_order(graph: Any, needed: set[str]) -> list[Any]:
    """The needed ops in topological order; a `Recv` after its `Send`."""
    ops = {op.name: op for op in graph.get_operations() if op.name in needed}
    senders = {
        op.get_attr("tensor_name"): op
        for op in ops.values()
        if op.type in ("Send", "_Send")
    }
    turn = {name: number for number, name in enumerate(ops)}

    def before(op: Any) -> list[Any]:
        found = [tensor.op for tensor in op.inputs]
        # TensorFlow lists control inputs in a different order each time.
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


SENDS = frozenset("Send _Send".split())
RECEIVES = frozenset("Recv _Recv".split())


class SendReceivePairs:
    """Matches receives with sends by name; either may be read from the graph first."""

    def __init__(self) -> None:
        self._sent: dict[str, Place] = {}
        self._awaited: list[tuple[int, str]] = []

    def send(self, name: str, source: Place) -> None:
        self._sent[name] = source

    def receive(self, name: str, place: int) -> Place | None:
        """The output that the op at `place` receives; None: not sent yet."""
        if name not in self._sent:
            self._awaited.append((place, name))
        return self._sent.get(name)

    def connect(self, ops: list[Op]) -> None:
        """Connects the receives that were read before their sends."""
        for place, name in self._awaited:
            source = self._sent.get(name)
            if source is None:
                continue
            size_bytes = ops[source[0]].output_bytes[source[1]]
            ops[place] = dataclasses.replace(
                ops[place],
                inputs=(source,),
                shares=(0,),
                output_bytes=(ops[place].output_bytes[0] or size_bytes,),
            )


# A list of these holds memory that exists anyway.
NOT_MADE = frozenset("Const Placeholder ReadVariableOp".split())
# Which input is the new item of a list.
NEW_ITEM = {"TensorListPushBack": 1, "TensorListSetItem": 2}


def iterations_of(op: Any) -> int | None:
    """Iterations of a `While`; None: unknown before it runs.

    A recurrent layer iterates once per item of the list its input is unstacked into.
    """
    most = tf.get_static_value(op.inputs[1]) if len(op.inputs) > 1 else None
    if most is not None and most.ndim == 0 and most > 0:
        return int(most)
    found = []
    for tensor in op.inputs:
        if tensor.op.type == "TensorListFromTensor":
            found.append(tensor.op.inputs[0].shape[0])
        elif tensor.op.type == "TensorListReserve":
            items = tf.get_static_value(tensor.op.inputs[1])
            found.append(None if items is None or items < 0 else int(items))
    known = [turns for turns in found if turns is not None]
    return max(known) if known else None


def kept_per_iteration(body: Any, place: int) -> Any:
    """The item that an iteration appends to list output `place`; None: nothing new."""
    output = body.outputs[place]
    if output.dtype != tf.variant:
        return None
    op = output.op
    while op.type == "Identity":
        op = op.inputs[0].op
    if op.type not in NEW_ITEM:
        return None
    item = op.inputs[NEW_ITEM[op.type]]
    is_known = item.shape.is_fully_defined() and item.dtype.size is not None
    return item if is_known and item.op.type not in NOT_MADE else None
