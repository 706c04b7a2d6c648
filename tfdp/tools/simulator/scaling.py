"""From one device to thousands: the curve, and which limit takes which part of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tfdp.errors import ConfigurationError
from tfdp.tools.simulator.machine import whole
from tfdp.tools.simulator.step import (
    MOST_DEVICES,
    PARTS,
    StepPrediction,
    Training,
    predict_step,
)

MOST_POINTS = 1000


def device_counts(first: int, last: int, devices_per_host: int) -> list[int]:
    """Powers of 2 within a host, then powers of 2 of hosts, and both ends.

    The last one is the most devices up to `last` that fill their hosts.

    >>> device_counts(1, 64, 8)
    [1, 2, 4, 8, 16, 32, 64]
    >>> device_counts(1, 48, 6)
    [1, 2, 4, 6, 12, 24, 48]
    >>> device_counts(1, 50, 6)
    [1, 2, 4, 6, 12, 24, 48]
    """
    whole("devices", "the first number", first, 1, MOST_DEVICES)
    whole("devices", "the last number", last, 1, MOST_DEVICES)
    whole("devices", "devices_per_host", devices_per_host, 1, MOST_DEVICES)
    if last > devices_per_host:
        last -= last % devices_per_host
    counts = {first, last}
    power = 1
    while power <= last:
        if power <= devices_per_host:
            counts.add(power)
        counts.add(power * devices_per_host)
        power *= 2
    return sorted(count for count in counts if first <= count <= last)


def scaling_curve(training: Training, devices: Iterable[int]) -> list[StepPrediction]:
    """A prediction for each number of devices, the local batch always the same.

    Raises:
      ConfigurationError: as `predict_step`, or for none or more than 1000 numbers.

    ```python
    from tfdp.tools.simulator.known import HARDWARE
    from tfdp.tools.simulator.known import MODELS
    from tfdp.tools.simulator.model import Compute
    from tfdp.tools.simulator.scaling import scaling_curve
    from tfdp.tools.simulator.step import Training

    compute = Compute.from_seconds(64 / 219, samples=64)  # 219 images/s of one P100
    training = Training(MODELS["resnet50"](), compute, HARDWARE["p100-25gbit"])
    for found in scaling_curve(training, [1, 4, 8, 64]):
        print(found.devices, round(found.efficiency, 2), found.largest_loss)
    ```
    """
    counts = list(devices)
    if not 1 <= len(counts) <= MOST_POINTS:
        raise ConfigurationError(
            f"a curve has 1 to {MOST_POINTS} numbers of devices. Received: "
            f"{len(counts)}."
        )
    return [predict_step(training, count) for count in counts]


def strong_scaling(
    training: Training, devices: Iterable[int], global_batch: int
) -> list[StepPrediction]:
    """The same with one global batch, shared out: its local batches shrink.

    Numbers of devices that do not divide `global_batch` are left out. What a replica
    computes shrinks with its batch, but for the update.

    Raises:
      ConfigurationError: as `scaling_curve`, or when no number divides the batch.
    """
    whole("strong_scaling", "global_batch", global_batch)
    found = []
    for count in devices:
        if global_batch % count:
            continue
        samples = global_batch // count
        part = samples / training.compute.samples
        compute = dataclasses.replace(
            training.compute,
            forward_seconds=part * training.compute.forward_seconds,
            backward_seconds=part * training.compute.backward_seconds,
            samples=samples,
        )
        found.append(
            predict_step(dataclasses.replace(training, compute=compute), count)
        )
    if not found:
        raise ConfigurationError(
            f"none of these numbers of devices divides the batch of {global_batch}."
        )
    return found


def lost_shares(found: StepPrediction) -> dict[str, float]:
    """Of a step, by part, the share that it takes; together 1."""
    return {part: found.part_seconds[part] / found.step_seconds for part in PARTS}
