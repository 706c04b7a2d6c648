"""What checkpoints and failures cost, and the best interval between checkpoints.

With the pause d of a checkpoint, the interval t of training between two of them, the
mean time M between failures of the whole cluster and the time R until it trains again:

    Young (1974)       t = sqrt(2 d M)
    Daly (2006)        t = sqrt(2 d M) (1 + sqrt(d / (2 M)) / 3 + d / (18 M)) - d,
                       and t = M where d >= 2 M
    Daly (2006)        all time / time of training
                       = M e^(R / M) (e^((t + d) / M) - 1) / t

for failures at random, in a checkpoint and in a restart as well.

Source: Daly (2006), "A higher order estimate of the optimum checkpoint interval for
restart dumps".
"""

from __future__ import annotations

import dataclasses
import functools
import math

from tfdp.errors import ConfigurationError
from tfdp.tools.simulator.machine import at_least_zero, positive, share

# Above this exponent nothing is ever done: the cluster fails before a checkpoint is.
MOST_EXPONENT = 500.0


def young_interval_seconds(pause_seconds: float, between_failures: float) -> float:
    """Young's interval, of the first order.

    >>> young_interval_seconds(pause_seconds=2.0, between_failures=100.0)
    20.0
    """
    return math.sqrt(2 * pause_seconds * between_failures)


def best_interval_seconds(pause_seconds: float, between_failures: float) -> float:
    """Daly's interval: training between two checkpoints that loses the least.

    >>> round(best_interval_seconds(2.0, 100.0), 3)
    18.689
    """
    if pause_seconds >= 2 * between_failures:
        return between_failures
    ratio = pause_seconds / (2 * between_failures)
    first = young_interval_seconds(pause_seconds, between_failures)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - pause_seconds


@dataclasses.dataclass(frozen=True)
class Lost:
    """Seconds lost for each second of training.

    Args:
      checkpoints: in the pauses.
      failures: training done again, and restarts; infinite where nothing is ever done.
      interval_seconds: between two checkpoints, 0 without any.
    """

    checkpoints: float
    failures: float
    interval_seconds: float


@dataclasses.dataclass(frozen=True)
class Reliability:
    """How often devices fail, and what is done about it.

    Args:
      device_hours_between_failures: of one device with its part of the host; above 0.
      restart_seconds: from a failure until training goes on, at least 0.
      checkpoint_pause_seconds: that a checkpoint holds up training, above 0.
      checkpoint_interval_seconds: of training between two, above 0; None: the best.
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
        """What so many devices lose, of which any one's failure stops all."""
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


# How long all wait for the slowest: the expected maximum of n draws.
#
# A step of a replica takes c (1 + e) with a random e. All wait for the slowest of n, so
# a step is longer by
#
#     normal       c s E_n, E_n the expected maximum of n standard normal numbers
#     exponential  c s (H_n - 1), H_n = 1 + 1/2 + ... + 1/n
#
# with the relative spread s (normal: the standard deviation; exponential: the mean of
# what comes on top, of which one mean is in the average already). What is slow by a
# factor f in a share q of its steps adds c (f - 1) (1 - (1 - q)^n).
#
# Source: order statistics, David and Nagaraja (2003), chapter 3; for stragglers in
# training Chen, Pan, Monga, Bengio and Jozefowicz (2016).


SHAPES = ("normal", "exponential")
# From here on 1/n is so small that the series of the harmonic number is exact.
FIRST_OF_SERIES = 1000
EULER = 0.5772156649015329
# Even, as Simpson's rule wants it.
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
    """Weights of Simpson's rule from 0 to 12, and 1 - F there; beyond, next to 0."""
    step = 12.0 / SIMPSON_PARTS
    found = []
    for place in range(SIMPSON_PARTS + 1):
        weight = 4.0 if place % 2 else 2.0
        if place in (0, SIMPSON_PARTS):
            weight = 1.0
        tail = 0.5 * math.erfc(place * step / math.sqrt(2))
        found.append((weight * step / 3, tail))
    return found


def harmonic(count: int) -> float:
    """1 + 1/2 + ... + 1/count.

    >>> round(harmonic(4), 6)  # Python 3.12 rounds a sum otherwise than 3.11
    2.083333
    """
    if count < FIRST_OF_SERIES:
        return sum(1 / number for number in range(1, count + 1))
    return math.log(count) + EULER + 1 / (2 * count) - 1 / (12 * count**2)


@dataclasses.dataclass(frozen=True)
class Jitter:
    """How unequal the replicas' steps are.

    Args:
      relative: the spread s, at least 0, as a share of what a step computes.
      shape: "normal" or "exponential".
      slow_share: of its steps in which a replica is slow, from 0 to 1.
      slow_factor: by which it is slow then, at least 1.
    """

    relative: float = 0.0
    shape: str = "normal"
    slow_share: float = 0.0
    slow_factor: float = 1.0

    def __post_init__(self) -> None:
        at_least_zero("Jitter", "relative", self.relative)
        share("Jitter", "slow_share", self.slow_share)
        positive("Jitter", "slow_factor", self.slow_factor)
        if self.slow_factor < 1 or self.shape not in SHAPES:
            raise ConfigurationError(
                f"Jitter: slow_factor must be at least 1, and shape one of "
                f"{' or '.join(SHAPES)}. Received: {self.slow_factor!r}, "
                f"{self.shape!r}."
            )

    def waiting_share(self, replicas: int) -> float:
        """By how much of its computing a step is longer, beyond the average.

        >>> Jitter(0.1, shape="exponential").waiting_share(2)
        0.05
        """
        spread = (
            expected_maximum(replicas)
            if self.shape == "normal"
            else harmonic(replicas) - 1
        )
        some_slow = 1 - (1 - self.slow_share) ** replicas
        return self.relative * spread + (self.slow_factor - 1) * some_slow
