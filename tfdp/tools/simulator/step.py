"""One step on so many devices: how long it takes, and which part takes what.

    step = compute + sharing of cores + communication + waiting + input
           + checkpoints + failures

Communication is what a step is longer for its sums: what of them backprop does not
hide, and what they take from it. Waiting is for the slowest replica, input for the next
batch.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence

from tfdp.errors import ConfigurationError
from tfdp.plan.buckets import Bucket
from tfdp.plan.topology import Topology
from tfdp.tools.simulator.failures import Jitter, Reliability
from tfdp.tools.simulator.lossy import Lossy
from tfdp.tools.simulator.machine import Machine, at_least_zero, positive, whole
from tfdp.tools.simulator.model import Compute, ModelProfile, ready_seconds
from tfdp.tools.simulator.sums import ALGORITHMS, Stage, exchange_stages, row_stages

MOST_DEVICES = 1 << 24
#: The parts of a step, in the order in which they are told.
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
    """The most samples a second that the input pipeline makes.

    Args:
      per_host: on each host, above 0; None for no limit.
      in_all: by a store that all hosts share, above 0; None for no limit.
    """

    per_host: float | None = None
    in_all: float | None = None

    def __post_init__(self) -> None:
        for name in ("per_host", "in_all"):
            if getattr(self, name) is not None:
                positive("InputRate", name, getattr(self, name))

    def seconds(self, topology: Topology, samples: int) -> float:
        """Between two batches, when each replica takes `samples`."""
        batch = topology.devices_per_host * samples
        limits = [0.0]
        if self.per_host is not None:
            limits.append(batch / self.per_host)
        if self.in_all is not None:
            limits.append(batch * topology.hosts / self.in_all)
        return max(limits)


@dataclasses.dataclass(frozen=True)
class Training:
    """What is trained, and on what; all but the number of devices.

    Args:
      model: its gradients.
      compute: of one replica.
      machine: hosts and links.
      algorithm: one of `sums.ALGORITHMS`.
      bucket_bytes, first_bucket_bytes: as in `tfdp.Communication`.
      overlap: False where sums wait for the whole of backprop.
      gather_parts: of the weights, gathered for forward and again for backward, as with
        `shard="parameters"`; tables are sent whole then.
      lossy: how hosts send gradients in fewer bytes; None: as they are. Rows of tables
        are sent as they are.
      jitter: how unequal replicas are.
      input_rate: of the input pipeline.
      reliability: failures and checkpoints; None without.
      sharing: by the number of replicas on a host, the factor by which each computes
        more slowly than alone, since they share its cores; others take the nearest
        larger number's, or the last one's.
      price_per_device_hour: of any currency, at least 0.

    Raises:
      ConfigurationError: a number means nothing, or there is no such algorithm.
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
        if self.algorithm not in ALGORITHMS:
            raise ConfigurationError(
                f"algorithm must be one of {', '.join(ALGORITHMS)}. Received: "
                f"{self.algorithm!r}."
            )

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The plan of a training with these sizes."""
        model = self.model.whole if self.gather_parts else self.model
        return model.buckets(
            bucket_bytes=self.bucket_bytes, first_bucket_bytes=self.first_bucket_bytes
        )

    def sharing_factor(self, replicas_per_host: int) -> float:
        """By what each replica of so many computes more slowly than alone."""
        if not self.sharing:
            return 1.0
        known = sorted(self.sharing)
        larger = [factor for number, factor in known if number >= replicas_per_host]
        return larger[0] if larger else known[-1][1]


@dataclasses.dataclass(frozen=True)
class StepPrediction:
    """A step, and where its time goes.

    Args:
      topology: hosts and devices.
      samples: of all replicas together.
      part_seconds: by the names of `PARTS`, which add up to the step.
      efficiency: samples a second of a device over those of one that computes only.
      sum_seconds: of all sums of a step together, hidden or not.
      price_per_million_samples: in the currency of the price.
    """

    topology: Topology
    samples: int
    part_seconds: dict[str, float]
    efficiency: float
    sum_seconds: float
    price_per_million_samples: float

    @property
    def step_seconds(self) -> float:
        """Of a step, with its part of checkpoints and failures."""
        return sum(self.part_seconds.values())

    @property
    def samples_per_second(self) -> float:
        """Of all replicas together."""
        return self.samples / self.step_seconds

    @property
    def devices(self) -> int:
        """Of all hosts together."""
        return self.topology.num_replicas

    @property
    def largest_loss(self) -> str:
        """The part besides the compute that takes most; "none" where nothing does."""
        losses = {part: self.part_seconds[part] for part in PARTS[1:]}
        name = max(losses, key=lambda part: losses[part])
        return name if losses[name] > 0 else "none"


def topology_of(devices: int, devices_per_host: int) -> Topology:
    """So many devices on hosts that are full, or on one that is not.

    Raises:
      ConfigurationError: they do not fill whole hosts.

    >>> print(topology_of(4, 8), "and", topology_of(16, 8))
    1 host x 4 devices and 2 hosts x 8 devices
    """
    whole("devices", "their number", devices, 1, MOST_DEVICES)
    if devices <= devices_per_host:
        return Topology(1, devices)
    if devices % devices_per_host:
        raise ConfigurationError(
            f"{devices} devices do not fill hosts of {devices_per_host}: take a "
            f"multiple of {devices_per_host}, or other hosts (devices_per_host)."
        )
    return Topology(devices // devices_per_host, devices_per_host)


def play_exchange(training: Training, topology: Topology) -> PlayedStep:
    """Forward, backward and sums of one step, without what is left to chance."""
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
            # What backward gathers goes over the link as well, before its scatter.
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
    return play_step(computing + late, all_ready, stages)


def _stages_of(
    training: Training,
    bucket: Bucket,
    topology: Topology,
    part: float,
    lossy: Lossy | None = None,
) -> list[Stage]:
    return exchange_stages(
        bucket.size_bytes or 0,
        topology,
        training.machine,
        training.algorithm,
        part=part,
        tensors=len(bucket.indices),
        lossy=lossy,
    )


def _tables(training: Training, topology: Topology) -> dict[int, list[Stage]]:
    """By the place of the gradient, what its rows go through."""
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
    """What forward waits for its weights: for the first of them, and a slow link."""
    if not training.gather_parts:
        return 0.0
    each = [
        sum(stage.seconds for stage in _stages_of(training, bucket, topology, 0.5))
        for bucket in buckets
    ]
    # Forward begins with the bucket that backward makes last.
    first, others = each[-1], sum(each[:-1])
    return first + max(others - forward_seconds, 0.0)


def predict_step(training: Training, devices: int) -> StepPrediction:
    """What a step takes on `devices` devices.

    Args:
      training: what is trained.
      devices: of all hosts together: full hosts, or a part of a single one.

    Raises:
      ConfigurationError: the devices fill no hosts, or the algorithm cannot act there.

    Cost: some microseconds for each bucket.
    """
    topology = topology_of(devices, training.machine.devices_per_host)
    alone = training.compute.seconds
    factor = training.sharing_factor(topology.devices_per_host)
    played = play_exchange(training, topology)
    undisturbed = alone - training.compute.update_seconds
    part_seconds = dict.fromkeys(PARTS, 0.0)
    part_seconds["compute"] = alone
    part_seconds["sharing cores"] = (factor - 1) * alone
    part_seconds["communication"] = max(played.end_seconds - factor * undisturbed, 0.0)
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


def _all_sums(training: Training, topology: Topology) -> float:
    scatter = 0.5 if training.gather_parts else 1.0
    stages = []
    for bucket in training.buckets:
        stages.append(_stages_of(training, bucket, topology, scatter, training.lossy))
        if training.gather_parts:  # for forward, and for backward
            stages.append(_stages_of(training, bucket, topology, 1.0))
    stages += _tables(training, topology).values()
    return sum(stage.seconds for own in stages for stage in own)


# A step played through: buckets become ready, travel in turn, and slow backprop down.
#
# Backprop goes on at the speed 1 - s, where s is the share that the sums on their way
# take of the computing. A bucket goes through its stages in order; each level of links
# carries one bucket at a time, first come, first served, so that while one bucket is
# between hosts the next one can be summed within them: unless both need the cores, and
# more of them than there are.


# Shares add up to it at most, but for rounding.
ALL_CORES = 1.0 + 1e-9


@dataclasses.dataclass(frozen=True)
class BucketTimes:
    """When one bucket was ready, began to travel, and was there; seconds."""

    ready_seconds: float
    start_seconds: float
    end_seconds: float


@dataclasses.dataclass(frozen=True)
class PlayedStep:
    """What came of a step, without the update.

    Args:
      computed_seconds: when backprop had ended, slowed down as it was.
      end_seconds: when backprop and all sums had ended.
      buckets: in the order of the plan.
    """

    computed_seconds: float
    end_seconds: float
    buckets: tuple[BucketTimes, ...]


def play_step(
    compute_seconds: float,
    ready_seconds: Sequence[float],
    stages: Sequence[Sequence[Stage]],
) -> PlayedStep:
    """Plays forward and backward of a step with its sums.

    Args:
      compute_seconds: of forward and backward, undisturbed.
      ready_seconds: by bucket, when its last gradient is there in an undisturbed step;
        at most `compute_seconds`.
      stages: by bucket, what its sum is made of.

    >>> once = [Stage("between", 2.0, 0.0)]
    >>> play_step(3.0, [1.0, 3.0], [once, once]).end_seconds
    5.0
    >>> busy = [Stage("within", 2.0, 1.0)]
    >>> play_step(3.0, [1.0, 3.0], [busy, busy]).end_seconds
    7.0
    """
    return _Player(compute_seconds, ready_seconds, stages).play()


class _Player:
    def __init__(
        self,
        compute_seconds: float,
        ready_seconds: Sequence[float],
        stages: Sequence[Sequence[Stage]],
    ):
        self._compute_seconds = compute_seconds
        self._stages = stages
        self._time = self._computed = 0.0
        # Undisturbed seconds of compute -> the bucket that is ready then.
        self._coming = sorted(
            (min(ready, compute_seconds), number)
            for number, ready in enumerate(ready_seconds)
        )
        self._coming.reverse()
        self._waiting: dict[str, list[tuple[float, int, int]]] = {}
        # Level -> (when it ends, bucket, place of its stage).
        self._travelling: dict[str, tuple[float, int, int]] = {}
        count = len(ready_seconds)
        self._ready, self._start, self._end = (
            [math.nan] * count,
            [math.nan] * count,
            [0.0] * count,
        )

    def play(self) -> PlayedStep:
        computed_at: float | None = None
        while computed_at is None or self._is_travelling():
            self._let_go()
            if self._advance() and computed_at is None:
                computed_at = self._time
        end = max([computed_at, *self._end])
        times = zip(self._ready, self._start, self._end, strict=True)
        return PlayedStep(computed_at, end, tuple(BucketTimes(*each) for each in times))

    def _is_travelling(self) -> bool:
        waits = any(self._waiting.values())
        return bool(self._coming or self._travelling or waits)

    def _advance(self) -> bool:
        """Goes to the next event; returns whether all is computed."""
        speed = self._speed()
        next_computed = self._coming[-1][0] if self._coming else self._compute_seconds
        until_computed = math.inf
        if speed > 0 and self._computed < self._compute_seconds:
            until_computed = max(next_computed - self._computed, 0.0) / speed
        elif next_computed <= self._computed and self._coming:
            until_computed = 0.0
        ends = min((end for end, _, _ in self._travelling.values()), default=math.inf)
        if self._time + until_computed <= ends:
            self._time += until_computed
            self._computed = max(self._computed, next_computed)
            if self._coming:
                _, number = self._coming.pop()
                self._ready[number] = self._time
                self._enter(number, 0)
        else:
            self._computed += speed * (ends - self._time)
            self._computed = min(self._computed, next_computed)
            self._time = ends
            self._arrive()
        return self._computed >= self._compute_seconds

    def _speed(self) -> float:
        return max(1.0 - self._taken(), 0.0)

    def _taken(self) -> float:
        """The part of the cores that the sums on their way have."""
        return sum(
            self._stages[number][place].compute_share
            for _, number, place in self._travelling.values()
        )

    def _enter(self, number: int, place: int) -> None:
        """The bucket waits for the level of its next stage, or is there."""
        stages = self._stages[number]
        if place == len(stages):
            self._end[number] = self._time
            if math.isnan(self._start[number]):
                self._start[number] = self._time
            return
        queue = self._waiting.setdefault(stages[place].level, [])
        heapq.heappush(queue, (self._time, number, place))

    def _let_go(self) -> None:
        # Levels in the order of those who have waited longest.
        for level in sorted(self._waiting, key=lambda name: self._waiting[name][:1]):
            queue = self._waiting[level]
            if not queue or level in self._travelling:
                continue
            _, number, place = queue[0]
            stage = self._stages[number][place]
            if self._travelling and self._taken() + stage.compute_share > ALL_CORES:
                continue
            heapq.heappop(queue)
            if math.isnan(self._start[number]):
                self._start[number] = self._time
            self._travelling[level] = (self._time + stage.seconds, number, place)

    def _arrive(self) -> None:
        for level, (end, number, place) in list(self._travelling.items()):
            if end <= self._time:
                del self._travelling[level]
                self._enter(number, place + 1)
