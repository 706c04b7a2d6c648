"""One step on so many devices: how long it takes, and which part takes what.

    step = compute + sharing of cores + communication + waiting + input
           + checkpoints + failures

Communication is what a step is longer for its sums: what of them backprop does not
hide, and what they take from it. Waiting is for the slowest replica, input for the next
batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tfdp.errors import ConfigurationError
from tfdp.plan.buckets import Bucket
from tfdp.plan.topology import Topology
from tfdp.tools.simulator.checked import at_least_zero, positive, whole
from tfdp.tools.simulator.failures import Reliability
from tfdp.tools.simulator.lossy import Lossy
from tfdp.tools.simulator.machine import Machine
from tfdp.tools.simulator.model import Compute, ModelProfile, ready_seconds
from tfdp.tools.simulator.overlap import PlayedStep, play_step
from tfdp.tools.simulator.stragglers import Jitter
from tfdp.tools.simulator.sums import ALGORITHMS, Stage, exchange_stages, row_stages

__all__ = [
    "MOST_DEVICES",
    "PARTS",
    "InputRate",
    "StepPrediction",
    "Training",
    "play_exchange",
    "predict_step",
    "topology_of",
]

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
