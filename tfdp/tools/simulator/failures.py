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
import math

from tfdp.tools.simulator.checked import at_least_zero, positive

__all__ = ["Lost", "Reliability", "best_interval_seconds", "young_interval_seconds"]

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
