"""One step on a number of devices: its duration, and the share of each cause.

    step = compute + sharing of cores + communication + waiting + input
           + checkpoints + failures

Communication is the time that backward does not hide, plus what sums take from
backward; waiting is for the slowest replica, input for the next batch.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence

from tfdp.checks import check_one_of
from tfdp.errors import ConfigurationError
from tfdp.plan.buckets import Bucket
from tfdp.plan.topology import Topology
from tfdp.tools.simulator.failures import Jitter, Reliability
from tfdp.tools.simulator.lossy import Lossy
from tfdp.tools.simulator.machine import Machine, at_least_zero, positive, whole
from tfdp.tools.simulator.model import Compute, ModelProfile, ready_seconds
from tfdp.tools.simulator.sums import (
    ALGORITHMS,
    ExchangePart,
    exchange_stages,
    row_stages,
)

MOST_DEVICES = 1 << 24
#: The parts of a step, in the order of reports.
PARTS = (
    "compute",
    "sharing cores",
    "communication",
    "waiting",
    "input",
    "checkpoints",
    "failures",
)


@dataclasses.dataclass(frozen=True)
class InputRate:
    """The most samples a second that a host's input pipeline makes; None: no limit."""

    per_host: float | None = None

    def __post_init__(self) -> None:
        if self.per_host is not None:
            positive("InputRate", "per_host", self.per_host)

    def seconds(self, topology: Topology, samples: int) -> float:
        """Seconds between two batches, if each replica takes `samples`."""
        if self.per_host is None:
            return 0.0
        return topology.devices_per_host * samples / self.per_host


@dataclasses.dataclass(frozen=True)
class Training:
    """A training and its machine; all but the number of devices.

    Args:
      compute: of one replica.
      algorithm: one of `sums.ALGORITHMS`.
      bucket_bytes, first_bucket_bytes: as in `tfdp.Communication`.
      overlap: False if sums start only after the whole backward pass.
      gather_parts: whether weights are gathered for forward and again for backward, as
        with `shard="parameters"`; tables are then sent whole.
      lossy: compression between hosts; None: none. Table rows are not compressed.
      reliability: failures and checkpoints; None: none.
      sharing: (replicas on a host, slowdown of each by shared cores) pairs; other
        numbers take that of the next larger one, or the largest.
      price_per_device_hour: in any currency.
    """

    model: ModelProfile
    compute: Compute
    machine: Machine
    algorithm: str = "two_level"
    bucket_bytes: int = 25 << 20
    first_bucket_bytes: int = 1 << 20
    overlap: bool = True
    gather_parts: bool = False
    lossy: Lossy | None = None
    jitter: Jitter = Jitter()
    input_rate: InputRate = InputRate()
    reliability: Reliability | None = None
    sharing: tuple[tuple[int, float], ...] = ()
    price_per_device_hour: float = 0.0

    def __post_init__(self) -> None:
        whole("Training", "bucket_bytes", self.bucket_bytes)
        whole("Training", "first_bucket_bytes", self.first_bucket_bytes)
        at_least_zero("Training", "price_per_device_hour", self.price_per_device_hour)
        for replicas, factor in self.sharing:
            whole("Training", "sharing's number of replicas", replicas)
            positive("Training", "sharing's factor", factor)
        check_one_of("algorithm", self.algorithm, ALGORITHMS)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        model = self.model.whole if self.gather_parts else self.model
        return model.buckets(
            bucket_bytes=self.bucket_bytes, first_bucket_bytes=self.first_bucket_bytes
        )

    def sharing_factor(self, replicas_per_host: int) -> float:
        """Slowdown of each of that many replicas by shared cores."""
        if not self.sharing:
            return 1.0
        known = sorted(self.sharing)
        larger = [factor for number, factor in known if number >= replicas_per_host]
        return larger[0] if larger else known[-1][1]


@dataclasses.dataclass(frozen=True)
class StepPrediction:
    """A step of all replicas together, and where its time goes.

    The `part_seconds`, by the names of `PARTS`, add up to the step; `sum_seconds` are
    those of all sums, hidden or not; `efficiency` compares with compute alone.
    """

    topology: Topology
    samples: int
    part_seconds: dict[str, float]
    efficiency: float
    sum_seconds: float
    price_per_million_samples: float

    @property
    def step_seconds(self) -> float:
        return sum(self.part_seconds.values())

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.step_seconds

    @property
    def devices(self) -> int:
        return self.topology.num_replicas

    @property
    def largest_loss(self) -> str:
        """The largest part besides the compute; "none" if all are 0."""
        losses = {part: self.part_seconds[part] for part in PARTS[1:]}
        name = max(losses, key=lambda part: losses[part])
        return name if losses[name] > 0 else "none"


def predict_step(training: Training, devices: int) -> StepPrediction:
    """Predicts a step on `devices` devices of all hosts: full hosts, or part of one.

    Raises ConfigurationError otherwise, or if the algorithm cannot run there.
    """
    topology = topology_of(devices, training.machine.devices_per_host)
    alone = training.compute.seconds
    factor = training.sharing_factor(topology.devices_per_host)
    end_seconds = simulate_exchange(training, topology)
    undisturbed = alone - training.compute.update_seconds
    part_seconds = dict.fromkeys(PARTS, 0.0)
    part_seconds["compute"] = alone
    part_seconds["sharing cores"] = (factor - 1) * alone
    part_seconds["communication"] = max(end_seconds - factor * undisturbed, 0.0)
    waiting = training.jitter.waiting_share(devices)
    part_seconds["waiting"] = waiting * factor * alone
    before_input = sum(part_seconds.values())
    input_seconds = training.input_rate.seconds(topology, training.compute.samples)
    part_seconds["input"] = max(input_seconds - before_input, 0.0)
    step_seconds = sum(part_seconds.values())
    if training.reliability is not None:
        lost = training.reliability.lost(devices)
        part_seconds["checkpoints"] = lost.checkpoints * step_seconds
        part_seconds["failures"] = lost.failures * step_seconds
    step_seconds = sum(part_seconds.values())
    samples = devices * training.compute.samples
    price_per_second = devices * training.price_per_device_hour / 3600
    return StepPrediction(
        topology=topology,
        samples=samples,
        part_seconds=part_seconds,
        efficiency=0.0 if math.isinf(step_seconds) else alone / step_seconds,
        sum_seconds=_all_sums(training, topology),
        price_per_million_samples=1e6 * price_per_second * step_seconds / samples,
    )


def topology_of(devices: int, devices_per_host: int) -> Topology:
    """The topology of that many devices on full hosts, or on a part of one."""
    whole("devices", "their number", devices, 1, MOST_DEVICES)
    if devices <= devices_per_host:
        return Topology(1, devices)
    if devices % devices_per_host:
        raise ConfigurationError(
            f"{devices} devices do not fill hosts of {devices_per_host}: take a "
            f"multiple of {devices_per_host}, or other hosts (devices_per_host)."
        )
    return Topology(devices // devices_per_host, devices_per_host)


def simulate_exchange(training: Training, topology: Topology) -> float:
    """Seconds of forward, backward and sums of one step, without random effects."""
    factor = training.sharing_factor(topology.devices_per_host)
    compute = training.compute
    ready = [factor * each for each in ready_seconds(training.model, compute)]
    computing = factor * (compute.forward_seconds + compute.backward_seconds)
    forward = factor * compute.forward_seconds
    parts = 1.0 if not training.gather_parts else 0.5
    buckets = training.buckets
    stages = []
    for bucket in buckets:
        own = _stages_of(training, bucket, topology, parts, training.lossy)
        if training.gather_parts:
            # Backward also gathers over the link, before its scatter.
            own = [*_stages_of(training, bucket, topology, parts), *own]
        stages.append(own)
    tables = _tables(training, topology)
    stages += tables.values()
    late = _late_forward(training, topology, buckets, forward)
    together = [*(bucket.indices for bucket in buckets), *((i,) for i in tables)]
    all_ready = [
        late + (max(ready[i] for i in indices) if training.overlap else computing)
        for indices in together
    ]
    return simulate_step(computing + late, all_ready, stages)


def _stages_of(
    training: Training,
    bucket: Bucket,
    topology: Topology,
    part: float,
    lossy: Lossy | None = None,
) -> list[ExchangePart]:
    return exchange_stages(
        bucket.size_bytes or 0,
        topology,
        training.machine,
        training.algorithm,
        part=part,
        tensors=len(bucket.indices),
        lossy=lossy,
    )


def _tables(training: Training, topology: Topology) -> dict[int, list[ExchangePart]]:
    """Stages of each table's row exchange, by the place of its gradient."""
    if training.gather_parts:
        return {}
    return {
        place: row_stages(
            each.row_bytes,
            each.size_bytes,
            each.adds_rows,
            topology,
            training.machine,
            training.algorithm,
            each.unadded_bytes,
        )
        for place, each in enumerate(training.model.gradients)
        if each.row_bytes
    }


def _late_forward(
    training: Training,
    topology: Topology,
    buckets: Sequence[Bucket],
    forward_seconds: float,
) -> float:
    """How long forward waits for gathered weights: the first, and a slow link."""
    if not training.gather_parts:
        return 0.0
    each = [
        sum(stage.seconds for stage in _stages_of(training, bucket, topology, 0.5))
        for bucket in buckets
    ]
    # Forward needs first what backward produces last.
    first, others = each[-1], sum(each[:-1])
    return first + max(others - forward_seconds, 0.0)


def _all_sums(training: Training, topology: Topology) -> float:
    scatter = 0.5 if training.gather_parts else 1.0
    stages = []
    for bucket in training.buckets:
        stages.append(_stages_of(training, bucket, topology, scatter, training.lossy))
        if training.gather_parts:  # for forward and for backward
            stages.append(_stages_of(training, bucket, topology, 1.0))
    stages += _tables(training, topology).values()
    return sum(stage.seconds for own in stages for stage in own)


# Simulation of a step: buckets become ready, travel in turn, and slow backward down.
#
# Backward runs at the speed 1 - s, where s is the compute share of the sums in flight.
# A bucket goes through its stages in order; each level of links carries one bucket at a
# time, first come first served. While one bucket is between hosts the next can be
# summed within them, unless both together need more cores than there are.

# Shares add up to at most this, rounding included.
ALL_CORES = 1.0 + 1e-9


def simulate_step(
    compute_seconds: float,
    ready_seconds: Sequence[float],
    stages: Sequence[Sequence[ExchangePart]],
) -> float:
    """Seconds from the start of forward to the end of backward and of all sums.

    `ready_seconds`: by bucket, when its last gradient is ready without interference;
    `stages`: by bucket, the stages of its sum.

    >>> once = [ExchangePart("between", 2.0, 0.0)]
    >>> simulate_step(3.0, [1.0, 3.0], [once, once])
    5.0
    >>> busy = [ExchangePart("within", 2.0, 1.0)]
    >>> simulate_step(3.0, [1.0, 3.0], [busy, busy])
    7.0
    """
    return _Simulation(compute_seconds, ready_seconds, stages).run()


class _Simulation:
    def __init__(
        self,
        compute_seconds: float,
        ready_seconds: Sequence[float],
        stages: Sequence[Sequence[ExchangePart]],
    ):
        self._compute_seconds = compute_seconds
        self._stages = stages
        self._time = self._computed = 0.0
        # (seconds of undisturbed compute, bucket that is ready then).
        self._due = sorted(
            (min(ready, compute_seconds), number)
            for number, ready in enumerate(ready_seconds)
        )
        self._due.reverse()
        self._waiting: dict[str, list[tuple[float, int, int]]] = {}
        # Level -> (end, bucket, place of its stage).
        self._in_flight: dict[str, tuple[float, int, int]] = {}

    def run(self) -> float:
        is_computed = False
        while not is_computed or self._is_pending():
            self._start_stages()
            self._advance()
            is_computed = self._computed >= self._compute_seconds
        return self._time

    def _is_pending(self) -> bool:
        waits = any(self._waiting.values())
        return bool(self._due or self._in_flight or waits)

    def _advance(self) -> None:
        """Advances to the next event."""
        speed = max(1.0 - self._taken(), 0.0)
        next_computed = self._due[-1][0] if self._due else self._compute_seconds
        until_computed = math.inf
        if speed > 0 and self._computed < self._compute_seconds:
            until_computed = max(next_computed - self._computed, 0.0) / speed
        elif next_computed <= self._computed and self._due:
            until_computed = 0.0
        ends = min((end for end, _, _ in self._in_flight.values()), default=math.inf)
        if self._time + until_computed <= ends:
            self._time += until_computed
            self._computed = max(self._computed, next_computed)
            if self._due:
                self._enter(self._due.pop()[1], 0)
        else:
            self._computed += speed * (ends - self._time)
            self._computed = min(self._computed, next_computed)
            self._time = ends
            self._arrive()

    def _taken(self) -> float:
        """Compute share of the sums in flight."""
        return sum(
            self._stages[number][place].compute_share
            for _, number, place in self._in_flight.values()
        )

    def _enter(self, number: int, place: int) -> None:
        """Queues the bucket for the level of its next stage, if there is one."""
        for stage in self._stages[number][place : place + 1]:
            queue = self._waiting.setdefault(stage.level, [])
            heapq.heappush(queue, (self._time, number, place))

    def _start_stages(self) -> None:
        # Levels with the longest wait first.
        for level in sorted(self._waiting, key=lambda name: self._waiting[name][:1]):
            queue = self._waiting[level]
            if not queue or level in self._in_flight:
                continue
            _, number, place = queue[0]
            stage = self._stages[number][place]
            if self._in_flight and self._taken() + stage.compute_share > ALL_CORES:
                continue
            heapq.heappop(queue)
            self._in_flight[level] = (self._time + stage.seconds, number, place)

    def _arrive(self) -> None:
        for level, (end, number, place) in list(self._in_flight.items()):
            if end <= self._time:
                del self._in_flight[level]
                self._enter(number, place + 1)
