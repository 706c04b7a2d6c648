"""Whether a training fits, before it is launched: `tfdp.planning.plan`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from tfdp.checks import is_whole
from tfdp.errors import ConfigurationError
from tfdp.plan.communication import Communication
from tfdp.plan.shards import Sharding, sharding_of
from tfdp.planning.liveness import StepMemory, run_in_thought
from tfdp.planning.traced_step import TracedModel, builder_of
from tfdp.strategies.devices import use_virtual_devices

__all__ = ["MARGIN", "MemoryPlan", "Planner", "plan"]

# What a prediction may be short of: it "fits" only with this share to spare.
MARGIN = 0.10
# More replicas than these are not traced: between two of these numbers each part of the
# memory grows and shrinks as a + b / N.
MOST_TRACED = 4


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What a step of one replica will need.

    Args:
      local_rows: of a replica's batch.
      replicas: how many train together, on all hosts.
      shard: "none", "optimizer", "gradients" or "parameters".
      remat: whether layers compute their forward pass twice.
      parts: what lies in memory at the peak: name to bytes.
      memory_bytes: what a replica may take; None: that was not asked.
      flops: additions and multiplications of a replica in a step.
      trainable_bytes: of the trainable weights.
      sent_bytes: what a replica sends in a step.
      notes: what the prediction does not know, in words.
    """

    local_rows: int
    replicas: int
    shard: str
    remat: bool
    parts: Mapping[str, int]
    memory_bytes: int | None
    flops: float
    trainable_bytes: int
    sent_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most that a replica has in memory at once."""
        return sum(self.parts.values())

    @property
    def needed_bytes(self) -> int:
        """The peak and the margin that a prediction needs: it fits in that much."""
        return round(self.peak_bytes * (1 + MARGIN))

    @property
    def fits(self) -> bool | None:
        """Whether it fits, the margin included; None: no memory was given."""
        return None if self.memory_bytes is None else self.fits_in(self.memory_bytes)

    def fits_in(self, memory_bytes: int) -> bool:
        """Whether it fits in that much, the margin included."""
        return self.needed_bytes <= memory_bytes

    def to_json(self) -> dict[str, Any]:
        """All of it, for a file."""
        return {
            **dataclasses.asdict(self),
            "parts": dict(self.parts),
            "peak_bytes": self.peak_bytes,
            "needed_bytes": self.needed_bytes,
            "fits": self.fits,
        }


def plan(
    model: Any,
    batch: Any,
    *,
    replicas: int = 1,
    hosts: int = 1,
    shard: str | int | Sharding = "none",
    remat: bool = False,
    memory_bytes: int | None = None,
    communication: Communication | None = None,
) -> MemoryPlan:
    """What a training step of `model` will need per replica, without running it.

        peak = max over the order of ops of  sum of the tensors that are held

    The step is traced as `fit` traces it, under a `DataParallelStrategy` of logical
    CPUs; nothing is trained, and the model that is given is left alone.

    Args:
      model: a function without arguments that builds and compiles a model, or a
        compiled model that Keras can make again from its configuration.
      batch: rows of the global batch; or arrays (x, y) of one; or a dataset's
        `element_spec`, whose first dimension is the global batch.
      replicas: of each host, at least 1.
      hosts: at least 1.
      shard: as `DataParallelStrategy` takes it.
      remat: whether `tfdp.remat` makes every layer a block.
      memory_bytes: what one replica may take.
      communication: as `DataParallelStrategy` takes it.

    Returns:
      The plan: `.peak_bytes`, `.parts`, `.fits`.

    Raises:
      ConfigurationError: when an argument is not as above, the batch has not a row for
        each replica, or something cannot be planned.
      DeviceError: when TensorFlow has already started with fewer logical CPUs than
        replicas are traced.

    Cost: the weights and the optimizer's state of every replica that is traced (at most
    4), in the memory of this process; seconds.

    ```python
    import keras
    from tfdp.planning import plan

    def build():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1000)])
        model.compile("adam", "mse")
        return model

    found = plan(build, batch=32, memory_bytes=2 * 2**20)
    print(found.peak_bytes, found.fits, found.parts["slots"])
    ```

    Source: what is stored where, Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054,
    section 3; the activations are counted, not taken from a formula.
    """
    planner = Planner(
        model,
        batch,
        replicas=replicas,
        hosts=hosts,
        shard=shard,
        communication=communication,
    )
    return planner.at(planner.local_rows, remat=remat, memory_bytes=memory_bytes)


class Planner:
    """Plans of one model for several batches and settings; see `plan`.

    Args:
      model: see `plan`, as the others.
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
    ):
        for name, value in (("replicas", replicas), ("hosts", hosts)):
            if not is_whole(value, least=1):
                raise ConfigurationError(
                    f"{name} must be an integer of at least 1. Received: {value!r}."
                )
        self.sharding = sharding_of(shard)
        if self.sharding.offloads:
            raise ConfigurationError(
                "offload='optimizer' is not planned yet: plan without it, and take the "
                "part 'slots' off what the device needs."
            )
        self.replicas = replicas * hosts
        self._of_host = replicas
        self._build = builder_of(model)
        self._batch = batch
        self._communication = communication
        self._traced: dict[tuple[int, str, bool], TracedModel] = {}
        self._found: dict[tuple[int, int, str, bool], dict[str, Any]] = {}
        self._rows: tuple[int, int] | None = None
        use_virtual_devices(_most_traced(self.replicas))

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
        remat: bool = False,
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
        sharding = self.sharding
        if shard is not None:
            sharding = dataclasses.replace(sharding, what=shard)
        numbers = self._traced_numbers(sharding)
        found = [self._measured(n, local_rows, sharding, remat) for n in numbers]
        parts = _at_number(
            numbers, [one["parts"] for one in found], self._parts_of(sharding)
        )
        return MemoryPlan(
            local_rows=local_rows,
            replicas=self.replicas,
            shard=str(sharding.what),
            remat=remat,
            parts=parts,
            memory_bytes=memory_bytes,
            flops=found[-1]["flops"],
            trainable_bytes=found[-1]["trainable_bytes"],
            sent_bytes=sent_bytes(
                found[-1]["trainable_bytes"], self.replicas, sharding.stage, remat
            ),
            notes=found[-1]["notes"],
        )

    def _parts_of(self, sharding: Sharding) -> int:
        """Over how many replicas a tensor is sharded."""
        return self._of_host if sharding.group == "host" else self.replicas

    def _traced_numbers(self, sharding: Sharding) -> tuple[int, ...]:
        if self.replicas == 1:
            return (1,)
        if not sharding.stage or self._parts_of(sharding) == 1:
            return (2,)
        parts = self._parts_of(sharding)
        return (parts,) if parts <= MOST_TRACED else (2, MOST_TRACED)

    def _model(
        self, number: int, sharding: Sharding | None = None, remat: bool = False
    ) -> TracedModel:
        sharding = sharding or self.sharding
        key = (number, str(sharding.what), remat)
        if key not in self._traced:
            # Weights of a setting that was looked at are in nobody's way any more.
            self._traced.clear()
            options: dict[str, Any] = {"communication": self._communication}
            if number > 1:
                options["shard"] = dataclasses.replace(sharding, group="all")
            self._traced[key] = TracedModel(
                self._build,
                [f"CPU:{i}" for i in range(number)],
                self._batch,
                remat=remat,
                options=options,
            )
        return self._traced[key]

    def _measured(
        self, number: int, local_rows: int, sharding: Sharding, remat: bool
    ) -> dict[str, Any]:
        key = (number, local_rows, str(sharding.what), remat)
        if key not in self._found:
            traced = self._model(number, sharding, remat)
            graph = traced.graph_of(local_rows)
            memory = run_in_thought(graph, threads=os.cpu_count() or 1)
            notes = [f"{times} {what}" for what, times in graph.notes.items()]
            if traced.is_compiled:
                notes.append(
                    "planned without XLA, which the model asks for (jit_compile): it "
                    "needs less, or the same"
                )
            self._found[key] = {
                "parts": _per_replica(memory, number),
                "flops": graph.flops / number,
                "trainable_bytes": traced.trainable_bytes,
                "notes": tuple(notes),
            }
        return self._found[key]


def sent_bytes(trainable_bytes: int, replicas: int, stage: int, remat: bool) -> int:
    """What a replica sends in a step, for gradients as large as the weights.

        2 P (N - 1) / N,  and 3 P (N - 1) / N  at stage 3 with `remat`

    >>> sent_bytes(100, replicas=4, stage=0, remat=False)
    150
    """
    ways = 3 if stage == 3 and remat else 2
    return ways * trainable_bytes * (replicas - 1) // replicas


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


def _most_traced(replicas: int) -> int:
    return min(replicas, MOST_TRACED)
