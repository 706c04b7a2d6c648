"""Plans of one model for several batches and settings, each traced once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.checks import is_whole
from tfdp.cluster.machine import usable_cores
from tfdp.errors import ConfigurationError, DeviceError
from tfdp.plan.communication import Communication
from tfdp.plan.shards import Sharding, sharding_of
from tfdp.plan.topology import Topology
from tfdp.strategies.devices import use_virtual_devices
from tfdp.tools.planning.liveness import TURNS, StepMemory, dry_run
from tfdp.tools.planning.memory_plan import MemoryPlan, sent_bytes
from tfdp.tools.planning.step_graph import NOT_KNOWN, Op, StepGraph
from tfdp.tools.planning.traced_step import TracedModel, builder_of

# More replicas than these are not traced: between two of these numbers each part of the
# memory grows and shrinks as a + b / N.
MOST_TRACED = 4


class Planner:
    """Plans of one model for several batches and settings; see `plan`.

    Args:
      model: see `plan`, as the others.
      any_rows: whether several numbers of rows will be asked about.
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
            if not is_whole(value, least=1):
                raise ConfigurationError(
                    f"{name} must be an integer of at least 1. Received: {value!r}."
                )
        self.sharding = sharding_of(shard)
        self.replicas = replicas * hosts
        self.hosts = hosts
        self._of_host = replicas
        self._build = builder_of(model)
        self._batch = batch
        self._communication = communication
        self._any_rows = any_rows
        self._traced: dict[tuple[int, str, bool | str], TracedModel] = {}
        self._found: dict[tuple[int, int, str, bool | str], dict[str, Any]] = {}
        self._graphs: dict[tuple[int, int, str, bool | str], StepGraph] = {}
        self._lines: dict[tuple[int, int, int, str, bool | str], StepOfRows] = {}
        self._rows: tuple[int, int] | None = None
        self._most_traced = _most_traced(communication, hosts)
        have_devices(replicas, self._most_traced, self.sharding.offloads)

    @property
    def local_rows(self) -> int:
        """Of the largest part of the batch that was asked about."""
        rows, _ = self._row_facts()
        if rows < self.replicas:
            raise ConfigurationError(
                f"The batch has {rows} rows for {self.replicas} replicas. Give at "
                "least one for each."
            )
        return -(-rows // self.replicas)

    @property
    def row_bytes(self) -> int:
        """Of one row of the batch."""
        return self._row_facts()[1]

    def _row_facts(self) -> tuple[int, int]:
        if self._rows is None:
            batch = self._model(self._traced_numbers(self.sharding)[0]).batch
            self._rows = batch.rows, batch.row_bytes
        return self._rows

    def at(
        self,
        local_rows: int,
        *,
        shard: str | None = None,
        remat: bool | str = False,
        memory_bytes: int | None = None,
    ) -> MemoryPlan:
        """The plan for batches of `local_rows` rows in each replica.

        Args:
          local_rows: at least 1.
          shard: in the place of what the planner was made with.
          remat: see `plan`, as `memory_bytes`.
          memory_bytes: see there.
        """
        if memory_bytes is not None and not is_whole(memory_bytes, least=1):
            raise ConfigurationError(
                "memory_bytes must be an integer of at least 1. Received: "
                f"{memory_bytes!r}."
            )
        sharding = self._sharding_of(shard)
        numbers = self._traced_numbers(sharding)
        found = [self._measured(n, local_rows, sharding, remat) for n in numbers]
        parts, of_host = self._parts_at(numbers, found)
        return MemoryPlan(
            local_rows=local_rows,
            replicas=self.replicas,
            shard=str(sharding.what),
            remat=remat,
            parts=parts,
            memory_bytes=memory_bytes,
            flops=found[-1]["flops"],
            trainable_bytes=found[-1]["trainable_bytes"],
            sent_bytes=self._sent_bytes(found[-1], local_rows, sharding, remat),
            hosts=self.hosts,
            host_parts=of_host,
            notes=found[-1]["notes"],
            is_known=found[-1]["is_known"],
        )

    def _traced_numbers(self, sharding: Sharding) -> tuple[int, ...]:
        """How many replicas of a host are traced."""
        of_host = self._of_host
        if of_host == 1:
            return (1,)
        # Without shards, and on one host, all replicas do the same.
        is_plain = self._communication in (None, Communication())
        if self.hosts == 1 and not sharding.stage and is_plain:
            return (2,)
        return (of_host,) if of_host <= self._most_traced else (2, self._most_traced)

    def _model(
        self, number: int, sharding: Sharding | None = None, remat: bool | str = False
    ) -> TracedModel:
        sharding = sharding or self.sharding
        key = (number, str(sharding.what), remat)
        if key not in self._traced:
            # Weights of a setting that was looked at are in nobody's way any more.
            self._traced.clear()
            # The memory of CPU:0 is the host's, where that is another one.
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
            self._graphs[key] = graph
            notes = [f"{times} {what}" for what, times in graph.notes.items()]
            if traced.is_compiled:
                notes.append(
                    "planned without XLA, which the model asks for (jit_compile)"
                )
            if traced.is_eager:
                notes.append(
                    "planned as a graph, and the model runs op by op (run_eagerly)"
                )
            self._found[key] = {
                **_facts_of(graph, number, sharding),
                "trainable_bytes": traced.trainable_bytes,
                "tables": traced.tables,
                "notes": tuple(notes),
                "is_known": not NOT_KNOWN & set(graph.notes),
            }
        return self._found[key]

    def computed(
        self,
        few: int,
        many: int,
        rows: int,
        *,
        shard: str | None = None,
        remat: bool | str = False,
        memory_bytes: int | None = None,
        quickly: bool = False,
    ) -> MemoryPlan:
        """The plan for `rows` rows, computed from two numbers that were traced.

        Args:
          few: rows that `at` was asked about.
          many: more of them.
          rows: those to compute it for.
          shard: as in `at`, like the others.
          remat: see there.
          memory_bytes: see there.
          quickly: in one order of ops, that of the peak for `many` rows, and not in
            all: the peak may be a little larger.

        Raises:
          ValueError: when TensorFlow built other graphs for the two.
        """
        sharding = self._sharding_of(shard)
        numbers = self._traced_numbers(sharding)
        found = []
        for number in numbers:
            graph = self._step_of_rows(number, few, many, sharding, remat).at(rows)
            traced = self._found[number, many, str(sharding.what), remat]
            turns = [traced["turn"]] if quickly else range(TURNS)
            found.append(_facts_of(graph, number, sharding, turns))
        parts, of_host = self._parts_at(numbers, found)
        traced = self._found[numbers[-1], many, str(sharding.what), remat]
        return dataclasses.replace(
            self.at(many, shard=shard, remat=remat, memory_bytes=memory_bytes),
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
            (table.size_bytes, table.sent_bytes(rows, adds_rows), adds_rows)
            for table, adds_rows in facts["tables"]
        ]
        return sent_bytes(
            facts["trainable_bytes"], self.replicas, sharding.stage, remat, tables
        )

    def are_of_one_graph(
        self,
        few: int,
        many: int,
        *,
        shard: str | None = None,
        remat: bool | str = False,
    ) -> bool:
        """Whether plans may be computed from these two numbers, which were traced."""
        sharding = self._sharding_of(shard)
        try:
            for number in self._traced_numbers(sharding):
                self._step_of_rows(number, few, many, sharding, remat)
        except ValueError:
            return False
        return True

    def _step_of_rows(
        self, number: int, few: int, many: int, sharding: Sharding, remat: bool | str
    ) -> StepOfRows:
        key = (number, few, many, str(sharding.what), remat)
        if key not in self._lines:
            graphs = [
                self._graphs[number, n, str(sharding.what), remat] for n in (few, many)
            ]
            self._lines[key] = StepOfRows(graphs[0], few, graphs[1], many)
        return self._lines[key]

    def _parts_at(
        self, numbers: tuple[int, ...], found: list[dict[str, Any]]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Of the device and of the host, for as many replicas as there are."""
        return (
            _at_number(numbers, [one["parts"] for one in found], self._of_host),
            _at_number(numbers, [one["host_parts"] for one in found], self._of_host),
        )

    def _sharding_of(self, shard: str | None) -> Sharding:
        if shard is None:
            return self.sharding
        return dataclasses.replace(self.sharding, what=shard)


def _most_traced(communication: Communication | None, hosts: int) -> int:
    """How many replicas of a host are traced at most: all of a stated hierarchy."""
    stated = None if communication is None else communication.hierarchy
    if hosts > 1 or not isinstance(stated, tuple):
        return MOST_TRACED
    return Topology(*stated).num_replicas


def _facts_of(
    graph: StepGraph,
    replicas: int,
    sharding: Sharding,
    turns: Sequence[int] = range(TURNS),
) -> dict[str, Any]:
    """What the play of a graph of so many replicas says of each of them."""
    of_host = {}
    if sharding.offloads:
        played = _played(side_of(graph, True), replicas, turns)
        of_host = _per_replica(played, replicas)
        graph = side_of(graph, False)
    played = _played(graph, replicas, turns)
    return {
        "parts": _per_replica(played, replicas),
        "host_parts": of_host,
        "flops": graph.flops / replicas,
        "turn": played.turn,
    }


def _played(graph: StepGraph, replicas: int, turns: Sequence[int]) -> StepMemory:
    threads = usable_cores()
    if replicas > 1:
        # Where replicas hand tensors to each other within a pass, all of them may be in
        # the middle of theirs, and what waits goes on in another thread: measured peaks
        # are those of one thread more.
        threads = max(threads + 1, replicas)
    return dry_run(graph, threads, turns)


def _per_replica(memory: StepMemory, replicas: int) -> dict[str, float]:
    return {part: size / replicas for part, size in memory.parts.items()}


def _at_number(
    numbers: tuple[int, ...], found: list[dict[str, float]], replicas: int
) -> dict[str, int]:
    """Each part for `replicas`, from what it is for one or two numbers of them.

    part(N) = a + b / N
    """
    if len(numbers) == 1:
        return {part: round(size) for part, size in found[0].items() if round(size)}
    few, many = numbers
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
    """Sees to it that there are logical CPUs to trace so many replicas on, or more.

    Before the first tensor is made: a model's data may be one.

    Args:
      replicas: of a host.
      most: how many are traced.
      is_offloading: whether the host has a device of its own.

    Raises:
      DeviceError: when TensorFlow has started with fewer.
    """
    count = min(replicas, most) + is_offloading
    [cpu, *_] = tf.config.list_physical_devices("CPU")
    asked_before = tf.config.get_logical_device_configuration(cpu) or ()
    if len(asked_before) >= count:
        return
    try:
        use_virtual_devices(count)
    except DeviceError:
        if len(tf.config.list_logical_devices("CPU")) < count:
            raise


# A step for any number of rows, from the same step traced for two of them.


class StepOfRows:
    """The step as a line over the rows of a batch.

        bytes(rows) = a + b rows    of each tensor

    Args:
      few: the step for `few_rows`.
      few_rows: fewer than `many_rows`.
      many: the same step for `many_rows`.
      many_rows: see `few_rows`.

    Raises:
      ValueError: when the two are not of the same ops: TensorFlow built another graph
        for another number of rows.
    """

    def __init__(self, few: StepGraph, few_rows: int, many: StepGraph, many_rows: int):
        if [_kept(op) for op in few.ops] != [_kept(op) for op in many.ops]:
            raise ValueError("the two steps are not of the same ops")
        if len(few.variables) != len(many.variables):
            raise ValueError("the two steps do not store the same variables")
        self._few, self._many = few, many
        self._few_rows, self._many_rows = few_rows, many_rows

    def at(self, rows: int) -> StepGraph:
        """The step for `rows` rows, at least 1."""
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


def _kept(op: Op) -> tuple[object, ...]:
    """What is the same for every number of rows."""
    return op.kind, op.inputs, op.controls, len(op.output_bytes), op.variable


# A step of which the host takes a part (`offload=`), as each of the two sees it.


def side_of(graph: StepGraph, on_host: bool) -> StepGraph:
    """The step with the memory of one side alone; the other side's takes none.

    What crosses has memory on both: it counts from when it is made until its last
    reader has run, which is a little longer than the copy lives.

    Args:
      graph: the step.
      on_host: the side.

    >>> from tfdp.tools.planning.liveness import dry_run
    >>> of_host = Op("Neg", ((0, 0),), (), (4,), on_host=True)
    >>> graph = StepGraph((Op("Made", output_bytes=(8,)), of_host))
    >>> [dry_run(side_of(graph, side)).peak_bytes for side in (False, True)]
    [8, 12]
    """
    read_here = {
        tensor for op in graph.ops if op.on_host == on_host for tensor in op.inputs
    }
    ops = tuple(
        op if op.on_host == on_host else _crossing(op, place, read_here)
        for place, op in enumerate(graph.ops)
    )
    variables = tuple(
        each if each.on_host == on_host else dataclasses.replace(each, size_bytes=0)
        for each in graph.variables
    )
    return dataclasses.replace(graph, ops=ops, variables=variables)


def _crossing(op: Op, place: int, read_here: set[tuple[int, int]]) -> Op:
    """An op of the other side: what it makes is here where it is read here."""
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
