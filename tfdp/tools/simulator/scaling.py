"""The scaling curve from one device to thousands, and the share of each limit."""

from __future__ import annotations

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

    The last one is the largest number up to `last` that fills its hosts.

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
    """A prediction for each number of devices, with a constant local batch."""
    counts = list(devices)
    if not 1 <= len(counts) <= MOST_POINTS:
        raise ConfigurationError(
            f"a curve has 1 to {MOST_POINTS} numbers of devices. Received: "
            f"{len(counts)}."
        )
    return [predict_step(training, count) for count in counts]


def lost_shares(found: StepPrediction) -> dict[str, float]:
    """Share of each part in a step; together 1."""
    return {part: found.part_seconds[part] / found.step_seconds for part in PARTS}
