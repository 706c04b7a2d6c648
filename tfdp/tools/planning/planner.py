"""Memory plans of one model for several batches and settings; each is traced once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp import use_virtual_devices
from tfdp.checks import check_whole
from tfdp.cluster.machine import usable_cores
from tfdp.errors import ConfigurationError, DeviceError
from tfdp.plan.communication import Communication
from tfdp.plan.shards import Sharding, sharding_of
from tfdp.plan.topology import Topology
from tfdp.tools.planning.liveness import ORDERS, StepMemory, dry_run
from tfdp.tools.planning.memory_plan import MemoryPlan, sent_bytes
from tfdp.tools.planning.step_graph import NOT_KNOWN, Op, StepGraph
from tfdp.tools.planning.traced_step import TracedModel, builder_of

# Trace at most this many replicas of a host; the rest follows a + b / N.
MOST_TRACED = 4


class Planner:
    """Memory plans of one model; arguments as in `plan`.

    `any_rows`: whether plans for several row counts will follow; they share a trace.
    """

    def __init__(
        self,
        model: Any,
        batch: Any,
        *,
        replicas: int = 1,
        hosts: int = 1,
        shard: str | int | Sharding = "none",
        communication: Communication | None = None,
        any_rows: bool = False,
    ):
        for name, value in (("replicas", replicas), ("hosts", hosts)):
            check_whole(name, value, least=1)
        self.sharding = sharding_of(shard)
        self.replicas = replicas * hosts
        self.hosts = hosts
        self._per_host = replicas
        self._build = builder_of(model)
        self._batch = batch
        self._communication = communication
        self._any_rows = any_rows
        self._traced: dict[tuple[int, str, bool | str], TracedModel] = {}
        self._found: dict[tuple[int, int, str, bool | str], dict[str, Any]] = {}
        self._interpolations: dict[tuple[Any, ...], InterpolatedStep] = {}
        self._most_traced = _most_traced(communication, hosts)
        have_devices(replicas, self._most_traced, self.sharding.offloads)

    @property
    def local_rows(self) -> int:
        """Rows of the largest shard of the batch."""
        rows, _ = self._row_facts
        if rows < self.replicas:
            raise ConfigurationError(
                f"The batch has {rows} rows for {self.replicas} replicas. Give at "
                "least one for each."
            )
        return -(-rows // self.replicas)

    @property
    def row_bytes(self) -> int:
        return self._row_facts[1]

    @functools.cached_property
    def _row_facts(self) -> tuple[int, int]:
        batch = self._model(self._traced_counts(self.sharding)[0]).batch
        return batch.rows, batch.row_bytes

    def at(
        self,
        local_rows: int,
        *,
        shard: str | None = None,
        remat: bool | str = False,
        memory_bytes: int | None = None,
    ) -> MemoryPlan:
        """The plan for `local_rows` a replica; `shard` overrides the planner's own."""
        if memory_bytes is not None:
            check_whole("memory_bytes", memory_bytes, least=1)
        sharding = self._sharding_of(shard)
        counts = self._traced_counts(sharding)
        found = [self._measured(n, local_rows, sharding, remat) for n in counts]
        own_bytes = found[-1]["gathered_row_bytes"] * local_rows
        parts, of_host = self._parts_at(counts, found, own_bytes)
        return MemoryPlan(
            local_rows=local_rows,
            replicas=self.replicas,
            shard=str(sharding.what),
            remat=remat or found[-1]["is_rematerialized"],
            parts=parts,
            memory_bytes=memory_bytes,
            flops=found[-1]["flops"],
            trainable_bytes=found[-1]["trainable_bytes"],
            sent_bytes=self._sent_bytes(found[-1], local_rows, sharding, remat),
            all_rows_bytes=own_bytes * (self.replicas - 1),
            hosts=self.hosts,
            host_parts=of_host,
            notes=found[-1]["notes"],
            is_known=found[-1]["is_known"],
        )

    def _traced_counts(self, sharding: Sharding) -> tuple[int, ...]:
        """How many replicas of a host to trace."""
        of_host = self._per_host
        if of_host == 1:
            return (1,)
        # On one host without shards all replicas do the same.
        is_plain = self._communication in (None, Communication())
        if self.hosts == 1 and not sharding.stage and is_plain:
            # With the rows of all replicas each holds more where there are more.
            return (min(of_host, self._most_traced) if self._sees_all_rows else 2,)
        return (of_host,) if of_host <= self._most_traced else (2, self._most_traced)

    @functools.cached_property
    def _sees_all_rows(self) -> bool:
        return self._model(2).sees_all_rows

    def _model(
        self, number: int, sharding: Sharding | None = None, remat: bool | str = False
    ) -> TracedModel:
        sharding = sharding or self.sharding
        key = (number, str(sharding.what), remat)
        if key not in self._traced:
            # Free the weights of the previous setting.
            self._traced.clear()
            # With offloading CPU:0 stands for the host.
            first = int(sharding.offloads)
            self._traced[key] = TracedModel(
                self._build,
                [f"CPU:{first + i}" for i in range(number)],
                self._batch,
                remat=remat,
                sharding=sharding,
                communication=self._communication,
                hosts=self.hosts,
            )
        return self._traced[key]

    def _measured(
        self, number: int, local_rows: int, sharding: Sharding, remat: bool | str
    ) -> dict[str, Any]:
        key = (number, local_rows, str(sharding.what), remat)
        if key not in self._found:
            traced = self._model(number, sharding, remat)
            graph = traced.graph_of(local_rows, of_any=self._any_rows)
            notes = [f"{times} {what}" for what, times in graph.notes.items()]
            if traced.is_compiled:
                notes.append("planned without XLA, though the model sets jit_compile")
            if traced.is_eager:
                notes.append("planned as a graph, though the model sets run_eagerly")
            if traced.sees_all_rows and self.hosts > 1:
                notes.append("what losses and metrics compute on rows of other hosts")
            notes += traced.without_effect
            self._found[key] = {
                **_facts_of(graph, number, sharding),
                "graph": graph,
                "trainable_bytes": traced.trainable_bytes,
                "owned_bytes": traced.owned_bytes,
                "is_rematerialized": traced.is_rematerialized,
                "tables": traced.tables,
                "gathered_row_bytes": traced.gathered_row_bytes,
                "notes": tuple(notes),
                "is_known": not NOT_KNOWN & set(graph.notes),
            }
        return self._found[key]

    def interpolated(
        self,
        few: int,
        many: int,
        rows: int,
        remat: bool | str,
        *,
        memory_bytes: int,
        one_order: bool,
    ) -> MemoryPlan:
        """The plan for `rows` rows, interpolated between two counts that `at` traced.

        `one_order`: dry-run only the op order of the peak at `many`: the true peak may
        be slightly larger. Raises ValueError if the two graphs differ.
        """
        sharding = self.sharding
        counts = self._traced_counts(sharding)
        found = []
        for number in counts:
            graph = self._interpolated_step(number, few, many, remat).at(rows)
            traced = self._found[number, many, str(sharding.what), remat]
            orders = [traced["order"]] if one_order else range(ORDERS)
            found.append(_facts_of(graph, number, sharding, orders))
        own_bytes = traced["gathered_row_bytes"] * rows
        parts, of_host = self._parts_at(counts, found, own_bytes)
        return dataclasses.replace(
            self.at(many, remat=remat, memory_bytes=memory_bytes),
            all_rows_bytes=own_bytes * (self.replicas - 1),
            local_rows=rows,
            parts=parts,
            host_parts=of_host,
            flops=found[-1]["flops"],
            sent_bytes=self._sent_bytes(traced, rows, sharding, remat),
        )

    def _sent_bytes(
        self, facts: dict[str, Any], rows: int, sharding: Sharding, remat: bool | str
    ) -> int:
        tables = [
            (
                table.size_bytes,
                table.sent_bytes(rows, adds_rows),
                adds_rows,
                table.sent_bytes(rows, True) if table.is_in_parts else None,
            )
            for table, adds_rows in facts["tables"]
        ]
        # On one host each replica sends an owner its shard; else each sends all.
        moved = facts["owned_bytes"] // (self.replicas if self.hosts == 1 else 1)
        trainable, stage = facts["trainable_bytes"], sharding.stage
        twice = remat or facts["is_rematerialized"]
        own_bytes = facts["gathered_row_bytes"] * rows
        sent = sent_bytes(trainable, self.replicas, stage, twice, tables, moved)
        return sent + own_bytes * (self.replicas - 1)

    def share_one_graph(self, few: int, many: int, remat: bool | str) -> bool:
        """Whether `interpolated` may be used between these two traced row counts."""
        try:
            for number in self._traced_counts(self.sharding):
                self._interpolated_step(number, few, many, remat)
        except ValueError:
            return False
        return True

    def _interpolated_step(
        self, number: int, few: int, many: int, remat: bool | str
    ) -> InterpolatedStep:
        key = (number, few, many, remat)
        if key not in self._interpolations:
            of_few, of_many = (
                self._found[number, n, str(self.sharding.what), remat]["graph"]
                for n in (few, many)
            )
            self._interpolations[key] = InterpolatedStep(of_few, few, of_many, many)
        return self._interpolations[key]

    def _parts_at(
        self, counts: tuple[int, ...], found: list[dict[str, Any]], own_bytes: int
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Parts of device and host, extrapolated to all replicas of a host; each holds
        `own_bytes` of every replica for losses and metrics."""
        parts, of_host = (
            _extrapolated(counts, [one[where] for one in found], self._per_host)
            for where in ("parts", "host_parts")
        )
        if own_bytes:
            # Rows that come from absent hosts have no length, and count as nothing.
            missing = self.replicas if self.hosts > 1 else self._per_host - counts[-1]
            parts["activations"] += own_bytes * missing
        return parts, of_host

    def _sharding_of(self, shard: str | None) -> Sharding:
        if shard is None:
            return self.sharding
        return dataclasses.replace(self.sharding, what=shard)


def _most_traced(communication: Communication | None, hosts: int) -> int:
    """How many replicas of a host to trace at most: all of an explicit hierarchy."""
    stated = None if communication is None else communication.hierarchy
    if hosts > 1 or not isinstance(stated, tuple):
        return MOST_TRACED
    return Topology(*stated).num_replicas


def _facts_of(
    graph: StepGraph,
    replicas: int,
    sharding: Sharding,
    orders: Sequence[int] = range(ORDERS),
) -> dict[str, Any]:
    """Per-replica results of dry-running a graph of `replicas` replicas."""
    of_host = {}
    if sharding.offloads:
        memory = _simulated(side_of(graph, True), replicas, orders)
        of_host = _per_replica(memory, replicas)
        graph = side_of(graph, False)
    memory = _simulated(graph, replicas, orders)
    return {
        "parts": _per_replica(memory, replicas),
        "host_parts": of_host,
        "flops": graph.flops / replicas,
        "order": memory.order,
    }


def _simulated(graph: StepGraph, replicas: int, orders: Sequence[int]) -> StepMemory:
    threads = usable_cores()
    if replicas > 1:
        # Replicas exchange tensors within a pass, so all may be in the middle of theirs
        # and continue on another thread: measured peaks match one thread more.
        threads = max(threads + 1, replicas)
    return dry_run(graph, threads, orders)


def _per_replica(memory: StepMemory, replicas: int) -> dict[str, float]:
    return {part: size / replicas for part, size in memory.parts.items()}


def _extrapolated(
    counts: tuple[int, ...], found: list[dict[str, float]], replicas: int
) -> dict[str, int]:
    """Each part for `replicas`, from one or two traced counts: part(N) = a + b / N."""
    if len(counts) == 1:
        return {part: round(size) for part, size in found[0].items() if round(size)}
    few, many = counts
    parts = {}
    for part in {**found[0], **found[1]}:
        at_few, at_many = found[0].get(part, 0.0), found[1].get(part, 0.0)
        slope = (at_few - at_many) / (1 / few - 1 / many)
        size = round(max(0.0, at_many + slope * (1 / replicas - 1 / many)))
        if size:
            parts[part] = size
    return parts


def have_devices(
    replicas: int, most: int = MOST_TRACED, is_offloading: bool = False
) -> None:
    """Creates the logical CPUs for tracing; call it before the first tensor is made.

    `is_offloading`: one more device stands for the host. Raises DeviceError if
    TensorFlow has already started with fewer.
    """
    count = min(replicas, most) + is_offloading
    [cpu, *_] = tf.config.list_physical_devices("CPU")
    configured = tf.config.get_logical_device_configuration(cpu) or ()
    if len(configured) >= count:
        return
    try:
        use_virtual_devices(count)
    except DeviceError:
        if len(tf.config.list_logical_devices("CPU")) < count:
            raise


class InterpolatedStep:
    """A step for any number of rows, interpolated: bytes(rows) = a + b rows.

    Raises ValueError if the steps for `few_rows` and `many_rows` differ in their ops:
    TensorFlow built another graph.
    """

    def __init__(self, few: StepGraph, few_rows: int, many: StepGraph, many_rows: int):
        if [_structure(op) for op in few.ops] != [_structure(op) for op in many.ops]:
            raise ValueError("the two steps are not of the same ops")
        if len(few.variables) != len(many.variables):
            raise ValueError("the two steps do not store the same variables")
        self._few, self._many = few, many
        self._few_rows, self._many_rows = few_rows, many_rows

    def at(self, rows: int) -> StepGraph:
        part = (rows - self._few_rows) / (self._many_rows - self._few_rows)

        def between(few: float, many: float) -> int:
            return max(0, round(few + part * (many - few)))

        ops = tuple(
            dataclasses.replace(
                a,
                output_bytes=tuple(map(between, a.output_bytes, b.output_bytes)),
                scratch_bytes=between(a.scratch_bytes, b.scratch_bytes),
                flops=float(between(a.flops, b.flops)),
            )
            for a, b in zip(self._few.ops, self._many.ops, strict=True)
        )
        variables = tuple(
            dataclasses.replace(a, size_bytes=between(a.size_bytes, b.size_bytes))
            for a, b in zip(self._few.variables, self._many.variables, strict=True)
        )
        return dataclasses.replace(self._few, ops=ops, variables=variables)


def _structure(op: Op) -> tuple[object, ...]:
    """The facts of an op that do not depend on the number of rows."""
    return op.kind, op.inputs, op.controls, len(op.output_bytes), op.variable


def side_of(graph: StepGraph, on_host: bool) -> StepGraph:
    """The step with only the memory of the host or of the device (`offload=`).

    A tensor that crosses counts on both sides from when it is made until its last
    reader has run: slightly longer than the copy lives.
    """
    read_here = {
        tensor for op in graph.ops if op.on_host == on_host for tensor in op.inputs
    }
    ops = tuple(
        op if op.on_host == on_host else _seen_from_other_side(op, place, read_here)
        for place, op in enumerate(graph.ops)
    )
    variables = tuple(
        each if each.on_host == on_host else dataclasses.replace(each, size_bytes=0)
        for each in graph.variables
    )
    return dataclasses.replace(graph, ops=ops, variables=variables)


def _seen_from_other_side(op: Op, place: int, read_here: set[tuple[int, int]]) -> Op:
    """Counts an op of the host (or device) only for outputs that this side reads."""
    return dataclasses.replace(
        op,
        output_bytes=tuple(
            size if (place, number) in read_here else 0
            for number, size in enumerate(op.output_bytes)
        ),
        # A copy, not the memory of the other side.
        shares=(),
        reuses=(),
        variable=None if op.access == "read" else op.variable,
        access="" if op.access == "read" else op.access,
        scratch_bytes=0,
    )
