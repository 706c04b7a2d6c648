"""Figures of a case, and their medians, spreads and ratios."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.bench.one_process.arms import STOCK_PREFIX
from benchmarks.bench.processes.arms import ONE_PROCESS


@dataclasses.dataclass(frozen=True)
class Spread:
    """The distribution of a set of figures."""

    median: float
    minimum: float
    maximum: float
    lower_quartile: float
    upper_quartile: float


def spread(figures: Sequence[float]) -> Spread:
    """Median, extremes and quartiles of at least one figure."""
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
    """Seconds per call, one figure per repeat.

    `items_per_call`: images of a training step over all replicas; 1 for a reduction.
    """

    seconds: tuple[float, ...]
    items_per_call: int = 1
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def items_per_second(self) -> tuple[float, ...]:
        """Speed, one figure per repeat."""
        return tuple(self.items_per_call / seconds for seconds in self.seconds)


def relative_speed(arm: ArmResult, reference: ArmResult) -> tuple[float, ...]:
    """How many times as fast `arm` was as `reference`, repeat by repeat.

    Figures of a repeat are close in time: a slow minute of the machine cancels out.
    """
    pairs = zip(arm.items_per_second, reference.items_per_second, strict=True)
    return tuple(mine / theirs for mine, theirs in pairs)


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """One case on one number of devices.

    `subject` has the sizes, `settings` the repeats, calls and the like; `arms` are in
    the order of the table; `left_out` says why an arm was not timed.
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
        """Plain data: the figures, with spreads and ratios for readers."""
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
        """The inverse of `to_json`; derived figures are recomputed."""
        arms = {
            name: ArmResult(tuple(row["seconds"]), row["items_per_call"], row["facts"])
            for name, row in plain["arms"].items()
        }
        fields = {each.name: plain[each.name] for each in dataclasses.fields(cls)}
        return cls(**{**fields, "arms": arms})


def efficiency(result: CaseResult) -> dict[str, tuple[float, ...]]:
    """Each arm's images/s over those of equally many single processes, by repeat.

    With efficiency 1, W workers are W times as fast as one process on one core. Arms
    without a measured single process are left out.
    """
    found = {}
    for name, arm in result.arms.items():
        one = arm.facts.get("one_process", ONE_PROCESS)
        if one in result.arms:
            workers = 1 if name == one else result.settings["workers"]
            ratios = relative_speed(arm, result.arms[one])
            found[name] = tuple(ratio / workers for ratio in ratios)
    return found
