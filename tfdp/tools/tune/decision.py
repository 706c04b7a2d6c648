"""Who wins: a challenger that beats the defaults by more than the spread. Pure.

The defaults and the challengers are measured in rounds, in turn. In each round the gain
of a challenger is its speed over that of the defaults in the same round, so that a slow
minute of the machine cancels out. With G the median of its gains over the rounds and S
their range, the largest less the smallest,

    it beats the defaults where  G - 1 > S

Then it was faster in every round, too. Of figures that differ by chance alone it lets
4.5% of single challengers pass in three rounds, and one of two finalists in 8% of the
cases, which are then as fast as the defaults; tests/pure/test_tune_decision.py counts.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from tfdp.tools.tune.setting import Setting

__all__ = ["LEAST_ROUNDS", "Gain", "Verdict", "decide"]

LEAST_ROUNDS = 2


@dataclasses.dataclass(frozen=True)
class Gain:
    """What a challenger gained on the defaults.

    Args:
      median: of its speed over theirs, in each round, less 1.
      spread: of these ratios, the largest less the smallest.
    """

    median: float
    spread: float

    @classmethod
    def of(cls, challenger: Sequence[float], defaults: Sequence[float]) -> Gain:
        """From speeds in samples per second, by round.

        >>> Gain.of([11.0, 12.0, 13.0], [10.0, 10.0, 10.0]).median
        0.19999999999999996
        """
        ratios = [a / b for a, b in zip(challenger, defaults, strict=True)]
        return cls(statistics.median(ratios) - 1, max(ratios) - min(ratios))

    @property
    def is_beyond_chance(self) -> bool:
        """Whether it is faster by more than the spread."""
        return self.median > self.spread


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What to train with.

    Args:
      winner: the setting.
      gains: of each challenger.
      rounds: that were measured.
    """

    winner: Setting
    gains: Mapping[Setting, Gain]
    rounds: int


def decide(
    defaults: Setting,
    default_speeds: Sequence[float],
    challengers: Mapping[Setting, Sequence[float]],
) -> Verdict:
    """The fastest challenger that beats the defaults by more than the spread, or they.

    Args:
      defaults: what nobody has to be told to use.
      default_speeds: samples per second, by round.
      challengers: the same of others; one that was not measured in every round that
        the defaults were cannot win.
    """
    rounds = len(default_speeds)
    gains = {
        setting: Gain.of(speeds, default_speeds)
        for setting, speeds in challengers.items()
        if len(speeds) == rounds >= LEAST_ROUNDS
    }
    better = [setting for setting, gain in gains.items() if gain.is_beyond_chance]
    winner = max(better, key=lambda each: gains[each].median, default=defaults)
    return Verdict(winner, gains, rounds)
