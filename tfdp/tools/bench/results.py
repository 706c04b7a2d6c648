"""Figures of a case, and what is made of them: medians, spreads, ratios."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tfdp.tools.bench.one_process.arms import STOCK_PREFIX
from tfdp.tools.bench.processes.arms import ONE_PROCESS


@dataclasses.dataclass(frozen=True)
class Spread:
    """Where a set of figures lies."""

    median: float
    minimum: float
    maximum: float
    lower_quartile: float
    upper_quartile: float


def spread(figures: Sequence[float]) -> Spread:
    """Median, extremes and quartiles of at least one figure.

    >>> spread([1.0, 2.0, 3.0, 4.0, 9.0]).median
    3.0
    """
    if len(figures) == 1:
        quartiles = [figures[0]] * 3
    else:
        quartiles = statistics.quantiles(figures, n=4, method="inclusive")
    return Spread(
        median=statistics.median(figures),
        minimum=min(figures),
        maximum=max(figures),
        lower_quartile=quartiles[0],
        upper_quartile=quartiles[2],
    )


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """What one arm took.

    Args:
      seconds: per call, one figure per repeat.
      items_per_call: images of a training step over all replicas; 1 for a reduction.
      facts: what else is worth keeping, such as the last loss.
    """

    seconds: tuple[float, ...]
    items_per_call: int = 1
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def items_per_second(self) -> tuple[float, ...]:
        """Speed, one figure per repeat."""
        return tuple(self.items_per_call / seconds for seconds in self.seconds)


def relative_speed(arm: ArmResult, reference: ArmResult) -> tuple[float, ...]:
    """How many times faster `arm` was than `reference`, repeat by repeat.

    Figures of the same repeat stand beside each other in time, so the machine's slow
    minutes cancel out of the ratio.
    """
    pairs = zip(arm.items_per_second, reference.items_per_second, strict=True)
    return tuple(mine / theirs for mine, theirs in pairs)


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """One case on one number of devices.

    Args:
      case, suite: as in `cases.Case`.
      devices: number of replicas.
      subject: what was reduced or trained, with its sizes.
      settings: repeats, calls, threads and what else decides the figures.
      arms: name -> figures, in the order of the table.
      left_out: name -> why an arm was not timed.
    """

    case: str
    suite: str
    devices: int
    subject: Mapping[str, Any]
    settings: Mapping[str, Any]
    arms: Mapping[str, ArmResult]
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def best_stock(self) -> str | None:
        """The stock arm with the lowest median; None where none was run."""
        stock = [name for name in self.arms if name.startswith(STOCK_PREFIX)]
        return min(
            stock,
            key=lambda name: statistics.median(self.arms[name].seconds),
            default=None,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data: the figures, and for readers the spreads and ratios."""
        plain = dataclasses.asdict(self)
        plain["best_stock"] = self.best_stock
        efficiencies = efficiency(self)
        for name, arm in self.arms.items():
            row = plain["arms"][name]
            if name in efficiencies:
                row["efficiency"] = dataclasses.asdict(spread(efficiencies[name]))
            row["seconds_spread"] = dataclasses.asdict(spread(arm.seconds))
            row["times_as_fast_as"] = {
                other: dataclasses.asdict(spread(relative_speed(arm, reference)))
                for other, reference in self.arms.items()
                if other != name
            }
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> CaseResult:
        """The result that `to_json` wrote; derived figures are made anew."""
        arms = {
            name: ArmResult(tuple(row["seconds"]), row["items_per_call"], row["facts"])
            for name, row in plain["arms"].items()
        }
        return cls(
            case=plain["case"],
            suite=plain["suite"],
            devices=plain["devices"],
            subject=plain["subject"],
            settings=plain["settings"],
            arms=arms,
            left_out=plain["left_out"],
        )


def efficiency(result: CaseResult) -> dict[str, tuple[float, ...]]:
    """By arm, its images/s over those of as many single processes, repeat by repeat.

    W workers with the efficiency 1 are W times as fast as one process on one core.
    Without the arms whose one process was not run.
    """
    found = {}
    for name, arm in result.arms.items():
        one = arm.facts.get("one_process", ONE_PROCESS)
        if one in result.arms:
            workers = 1 if name == one else result.settings["workers"]
            ratios = relative_speed(arm, result.arms[one])
            found[name] = tuple(ratio / workers for ratio in ratios)
    return found
