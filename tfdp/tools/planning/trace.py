"""The graph of a training step, traced and not run, as a `StepGraph`."""

from __future__ import annotations

import collections
import dataclasses
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
from tfdp.exchange.compressed import COMPRESSED_SUM, WHERE_FINITE
from tfdp.exchange.host_calls import LINK_CALL
from tfdp.tools.planning.any_rows import AnyRows
from tfdp.tools.planning.liveness import (
    OF_LINKS,
    dry_run,
    lying_in_what_links_keep,
)
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
# What has its memory elsewhere: the batch, which stands among the variables.
GIVEN = frozenset("Placeholder".split())
CONSTANT = "Const"
# Of no known shape and no size: shapes, and what a GPU keeps of a batch normalization.
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
    """The step as plain values.

    Args:
      graph: of a concrete function.
      variables: for each variable that the function captured, by the `id` of its
        handle: its place, and what it is.
      batch_bytes: of what the function is given, which lives as long as it runs.
      weight_shapes: of the trainable weights, by which their gradients are known.
      hosts: that train together; each brings as many rows of an embedding.
      host_device: the end of the name of the device whose memory is the host's; "":
        none is.
      rows: for which the step is wanted; None: for those that it was traced for.

    Returns:
      The step; ops that nothing needs are left out, as TensorFlow leaves them out.

    Raises:
      NotOfRows: with `rows`, where lengths may depend on them in another way.
    """
    stored = [stored for _, stored in sorted(variables.values(), key=_place)]
    stored.append(StoredVariable(batch_bytes, "batch"))
    reader = _Reader(stored, weight_shapes, hosts, host_device, rows)
    handles = {
        inner.op.name: variables[id(outer)][0]
        for outer, inner in graph.captures
        if id(outer) in variables
    }
    results = reader.read(graph, {}, handles, needed_ops(graph))
    reader.hand_overs.connect(reader.ops)
    ops = tuple(reader.ops)
    return StepGraph(
        ops,
        tuple(reader.variables),
        tuple(place for place in results if place is not None),
        dict(reader.notes),
        lying_in_what_links_keep(ops, reader.variables),
    )


def _place(item: tuple[int, StoredVariable]) -> int:
    return item[0]


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
        #: Where the function runs that is being read: what its ops do not say.
        self._device = ""
        #: The names of the calls of it.
        self._caller = ""
        self._weight_shapes = frozenset(weight_shapes)
        self.ops: list[Op] = []
        self.notes: collections.Counter[str] = collections.Counter()
        self.hand_overs = SendReceivePairs()

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
            if inner is not None and not _is_fused(op):
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
        self._begin_behind(first, controls)
        ends[op.name] = list(range(first, len(self.ops)))
        for number, result in enumerate(results):
            places[op.name, number] = result

    def _begin_behind(self, first: int, controls: Sequence[int]) -> None:
        """Has ops from `first` on that wait for nothing wait for `controls`."""
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
        if LINK_CALL in op.name and op.type in PYTHON:
            variable, access = self._pooled(op, inputs, read), "read"
        shares: list[int | None] = []
        is_finite = op.type in BRANCHES and WHERE_FINITE in op.name
        for number in range(len(made)):
            shared = shared_input(op.type, read, made, number)
            if is_finite:
                shared = handed_on(op, number)
            shares.append(None if shared is None else renumbered.get(shared))
        transposes = op.type == "MatMul" and op.get_attr("transpose_a")
        if op.type in ("BatchMatMulV2", "BatchMatMul"):
            transposes = op.get_attr("adj_x")
        own_inputs = [place for place in inputs if place is not None]
        if op.type in SENT:
            self.hand_overs.send(op.get_attr("tensor_name").decode(), own_inputs[0])
        elif op.type in RECEIVED:
            name = op.get_attr("tensor_name").decode()
            source = self.hand_overs.receive(name, len(self.ops))
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
            scratch_bytes=scratch_bytes_of(op.type, read, made, _equation_of(op))
            + (0 if is_finite else self._inside_bytes(op)),
            flops=flops_of(op.type, read, made, bool(transposes))
            + self._inside_flops(op),
            part=self._part_of(op),
            name=op.name,
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
        """A link writes into memory of its own, which it keeps for the next step.

        It is as large as what the link is given, of which it may hand on a part.
        """
        made = sum(self._size_of(op, n, inputs) for n in range(len(op.outputs)))
        given = sum(tensor.size_bytes for tensor in read)
        self.variables.append(StoredVariable(max(made, given), OF_LINKS))
        return len(self.variables) - 1

    def _size_of(
        self,
        op: Any,
        number: int,
        inputs: Sequence[Place | None],
    ) -> int:
        tensor = self._ensured(op.outputs[number])
        if op.type in LOOPS and (body := called_graph(op, "body")) is not None:
            item = kept_per_turn(body, number)
            kept = 0 if item is None else self._tensor(item).size_bytes
            kept *= turns_of(op) or 1
            return max(kept, tensor.size_bytes)
        if op.type in GIVEN or op.type == CONSTANT:
            return 0
        if tensor.shape is not None or not tensor.element_bytes:
            return tensor.size_bytes
        if op.type in SMALL:
            return 0
        if op.type in RECEIVED:
            return self._bytes_at(inputs[0]) if inputs else 0
        self.notes["tensors whose shape is not known before the step runs"] += 1
        read = [self._bytes_at(place) for place in inputs if place is not None]
        if op.type in PYTHON and LINK_CALL in op.name and number < len(read):
            return self._hosts * read[number]
        return most_bytes(op.type, read)

    def _bytes_at(self, place: Place | None) -> int:
        return 0 if place is None else self.ops[place[0]].output_bytes[place[1]]

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
                reader = _Reader([], hosts=self._hosts, rows=self._rows)
                reader.read(inner, {}, {}, needed_ops(inner))
                step = StepGraph(tuple(reader.ops), tuple(reader.variables))
                peaks.append(dry_run(step).peak_bytes)
        return max(peaks)

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

    def _ensured(self, tensor: Any) -> Tensor:
        """What only the running step knows: as large as the next op makes sure of."""
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

    def _inside_flops(self, op: Any) -> float:
        """Of all turns of a loop; of the branches of a conditional together."""
        attributes = ("body",) if op.type in LOOPS else BRANCHES.get(op.type, ())
        total = 0.0
        for attribute in attributes:
            if (inner := called_graph(op, attribute)) is not None:
                reader = _Reader([], rows=self._rows)
                reader.read(inner, {}, {}, needed_ops(inner))
                total += sum(inside.flops for inside in reader.ops)
        return total * ((turns_of(op) or 1) if op.type in LOOPS else 1)


def _is_fused(op: Any) -> bool:
    """What compresses goes element by element: XLA makes one loop of it."""
    return COMPRESSED_SUM in op.name and is_compiled_by_xla(op)


def _equation_of(op: Any) -> str:
    return op.get_attr("equation").decode() if op.type == "Einsum" else ""


# Which inputs of a conditional are its results, where its first branch is taken.


#: Conditionals -> the attributes that name their branches.
BRANCHES = {
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
}


def handed_on(op: Any, number: int) -> int | None:
    """The input of `op` that its first branch returns as output `number`.

    TensorFlow runs a conditional as switches, which have no memory of their own.

    Args:
      op: of BRANCHES.
      number: of the output.

    Returns:
      The input's place; None: the branch makes the output itself.
    """
    inner = called_graph(op, BRANCHES[op.type][0])
    if inner is None:
        return None
    tensor = inner.outputs[number]
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    places = [place for place, each in enumerate(inner.inputs) if each is tensor]
    # The first input says which branch.
    return places[0] + 1 if places else None


# Which ops of a function are needed, and an order in which they can run.


def needed_ops(graph: Any) -> set[str]:
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


def in_order(graph: Any, needed: set[str]) -> list[Any]:
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


# What one replica hands to another within a step: who receives which tensor.
#
# A replica sends and receives by name, in functions of its own, so that a tensor may be
# received, as the graph is read, before it was sent.


SENT = frozenset("Send _Send".split())
RECEIVED = frozenset("Recv _Recv".split())


class SendReceivePairs:
    """Sources of what is received, by the names under which it is sent."""

    def __init__(self) -> None:
        self._sent: dict[str, Place] = {}
        self._awaited: list[tuple[int, str]] = []

    def send(self, name: str, source: Place) -> None:
        """Notes what is sent."""
        self._sent[name] = source

    def receive(self, name: str, place: int) -> Place | None:
        """What the op at `place` receives; None: it was not sent yet, see `connect`."""
        if name not in self._sent:
            self._awaited.append((place, name))
        return self._sent.get(name)

    def connect(self, ops: list[Op]) -> None:
        """Gives those their tensors who were read before what is sent to them."""
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


# What a loop keeps of its turns, for the backward pass and as its result.


# Of these a list holds what is there anyway.
NOT_MADE = frozenset("Const Placeholder ReadVariableOp".split())
# Which input of them is the new item of a list.
NEW_ITEM = {"TensorListPushBack": 1, "TensorListSetItem": 2}


def turns_of(op: Any) -> int | None:
    """How often a `While` turns; None: that is not known before it runs.

    A recurrent layer turns once for each item of the list that its input is cut into.
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


def kept_per_turn(body: Any, place: int) -> Any:
    """What each turn adds to output `place` of a loop; None: it is no list, or that is
    there anyway.

    Args:
      body: the graph of a turn.
      place: of the loop's output.
    """
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
