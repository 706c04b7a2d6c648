"""Cost of checkpoints, failures and stragglers; the best checkpoint interval.

With the pause d of a checkpoint, the training time t between two of them, the mean time
M between failures of the whole cluster and the time R of a restart:

    Young (1974)       t = sqrt(2 d M)
    Daly (2006)        t = sqrt(2 d M) (1 + sqrt(d / (2 M)) / 3 + d / (18 M)) - d,
                       and t = M where d >= 2 M
    Daly (2006)        all time / time of training
                       = M e^(R / M) (e^((t + d) / M) - 1) / t

for random failures, also during a checkpoint or a restart. Source: Daly (2006), "A
higher order estimate of the optimum checkpoint interval for restart dumps".
"""

from __future__ import annotations

import dataclasses
import functools
import math

from tfdp.tools.simulator.machine import at_least_zero, positive

# Beyond this exponent the cluster practically always fails before a checkpoint.
MOST_EXPONENT = 500.0


def best_interval_seconds(pause_seconds: float, between_failures: float) -> float:
    """Daly's interval between two checkpoints, which loses the least.

    >>> round(best_interval_seconds(2.0, 100.0), 3)
    18.689
    """
    if pause_seconds >= 2 * between_failures:
        return between_failures
    ratio = pause_seconds / (2 * between_failures)
    first = math.sqrt(2 * pause_seconds * between_failures)  # Young's
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - pause_seconds


@dataclasses.dataclass(frozen=True)
class Lost:
    """Seconds lost for each second of training, with the interval between checkpoints.

    `failures`: repeated training and restarts; infinite if nothing is ever finished.
    """

    checkpoints: float
    failures: float
    interval_seconds: float


@dataclasses.dataclass(frozen=True)
class Reliability:
    """Failure rate of devices, and the handling of failures.

    Args:
      device_hours_between_failures: of one device with its part of the host; above 0.
      restart_seconds: from a failure until training continues, at least 0.
      checkpoint_pause_seconds, checkpoint_interval_seconds: pause for a checkpoint, and
        training between two, above 0; None: the best interval.
    """

    device_hours_between_failures: float
    restart_seconds: float = 0.0
    checkpoint_pause_seconds: float = 1.0
    checkpoint_interval_seconds: float | None = None

    def __post_init__(self) -> None:
        owner = "Reliability"
        hours = self.device_hours_between_failures
        positive(owner, "device_hours_between_failures", hours)
        at_least_zero(owner, "restart_seconds", self.restart_seconds)
        positive(owner, "checkpoint_pause_seconds", self.checkpoint_pause_seconds)
        if self.checkpoint_interval_seconds is not None:
            interval = self.checkpoint_interval_seconds
            positive(owner, "checkpoint_interval_seconds", interval)

    def lost(self, devices: int) -> Lost:
        """Losses of that many devices, where each failure stops all."""
        between = 3600 * self.device_hours_between_failures / devices
        pause = self.checkpoint_pause_seconds
        interval = self.checkpoint_interval_seconds
        if interval is None:
            interval = best_interval_seconds(pause, between)
        checkpoints = pause / interval
        exponent = (interval + pause) / between
        restart = self.restart_seconds / between
        if exponent + restart > MOST_EXPONENT:
            return Lost(checkpoints, math.inf, interval)
        total = between * math.exp(restart) * math.expm1(exponent) / interval
        return Lost(checkpoints, max(total - 1 - checkpoints, 0.0), interval)


# Even, as Simpson's rule requires.
SIMPSON_PARTS = 2000


@functools.lru_cache(maxsize=4096)
def expected_maximum(count: int) -> float:
    """The expected maximum of `count` standard normal numbers, to some 1e-7.

    E = integral over x > 0 of (1 - F^n) - integral over x < 0 of F^n, F the normal
    distribution function.

    >>> [round(expected_maximum(count), 4) for count in (1, 2, 3, 16384)]
    [0.0, 0.5642, 0.8463, 3.9714]
    """
    above = below = 0.0
    for weight, tail in _tails():
        above -= weight * math.expm1(count * math.log1p(-tail))
        below += weight * tail**count
    return above - below


@functools.cache
def _tails() -> list[tuple[float, float]]:
    """Simpson's weights from 0 to 12, and 1 - F there; beyond, F is next to 1."""
    step = 12.0 / SIMPSON_PARTS
    found = []
    for place in range(SIMPSON_PARTS + 1):
        weight = 4.0 if place % 2 else 2.0
        if place in (0, SIMPSON_PARTS):
            weight = 1.0
        tail = 0.5 * math.erfc(place * step / math.sqrt(2))
        found.append((weight * step / 3, tail))
    return found


@dataclasses.dataclass(frozen=True)
class Jitter:
    """Random variation of the replicas' steps, by a normal share `relative` of each.

    All wait for the slowest of n, so a step is longer by E_n, the expected maximum of n
    standard normal numbers, times that (David and Nagaraja 2003, "Order Statistics",
    chapter 3).
    """

    relative: float = 0.0

    def __post_init__(self) -> None:
        at_least_zero("Jitter", "relative", self.relative)

    def waiting_share(self, replicas: int) -> float:
        """How much longer a step is, as a share of its compute."""
        return self.relative * expected_maximum(replicas)
