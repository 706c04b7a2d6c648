"""The trials as text: what was tried, the results, and the choice."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from tfdp.tools.tune.space import Setting, Space, size_text
from tfdp.tools.tune.tuning import LEAST_ROUNDS, Trial, TuningResult

ENGINES = {
    "in_process": "replicas hand tensors to each other (engine in_process)",
    "tensorflow": "TensorFlow's collectives (engine tensorflow)",
    "sockets": "sums over sockets",
}
SHARDED = {
    "optimizer": "the optimizer's state",
    "gradients": "gradients and the optimizer's state",
    "parameters": "weights, gradients and the optimizer's state",
}


@dataclasses.dataclass(frozen=True)
class Terms:
    """Words of reports: the name of the baseline, and the unit of speeds."""

    name: str = "the defaults"
    unit: str = "samples/s"


DEFAULT_TERMS = Terms()


def changes_in_words(setting: Setting) -> str:
    """The options that differ from the defaults.

    >>> changes_in_words(Setting(bucket_bytes=4 << 20, remat=True))
    'buckets of 4 MiB, remat'
    >>> changes_in_words(Setting())
    'the defaults'
    """
    parts = []
    for name, value in setting.changes.items():
        if name == "bucket_bytes":
            parts.append(f"buckets of {size_text(value)}")
        elif name == "first_bucket_bytes":
            parts.append(f"first and last of {size_text(value)}")
        elif name == "hierarchy":
            parts.append(f"levels of {value[0]} x {value[1]}")
        elif name == "lossy":
            parts.append(f"gradients as {value}")
        elif name == "shard":
            parts.append(f"shard={value!r}")
        elif name == "accumulation_steps":
            parts.append(f"the batch in {value} steps")
        else:
            parts.append("remat" if name == "remat" else ENGINES.get(value, value))
    return ", ".join(parts) or "the defaults"


def effect(setting: Setting, baseline: Setting, space: Space) -> str:
    """The countable differences from the baseline."""
    parts = []
    mine, theirs = space.buckets(setting), space.buckets(baseline)
    if mine and len(mine) != len(theirs):
        more = len(mine) - len(theirs)
        parts.append(
            f"{abs(more)} {'launches' if abs(more) > 1 else 'launch'} "
            f"{'more' if more > 0 else 'fewer'} a step ({len(mine)}, not "
            f"{len(theirs)})"
        )
    elif mine != theirs:
        largest, other = (
            f"{max(bucket.size_bytes or 0 for bucket in each) / 1e6:,.2f} MB"
            for each in (mine, theirs)
        )
        larger = f": the largest {largest}, not {other}" if largest != other else ""
        parts.append(f"equally many launches of other sizes{larger}")
    if setting.lossy != baseline.lossy:
        parts.append("fewer bytes between hosts, and other numbers")
    if setting.shard != baseline.shard:
        parts.append(f"replicas hold parts of {SHARDED.get(setting.shard, 'nothing')}")
    if setting.remat and not baseline.remat:
        parts.append("the forward pass is computed twice")
    if setting.accumulation_steps > baseline.accumulation_steps:
        parts.append("fewer rows at a time")
    return "; ".join(parts)


def line_of_trial(
    number: int,
    trial: Trial,
    baseline: Trial,
    space: Space,
    terms: Terms = DEFAULT_TERMS,
) -> str:
    """One line on trial `number` (0: the baseline) and its result."""
    head = f"trial {number}: {_name(trial, baseline, terms)}"
    if trial.speed is None:
        return f"{head}: failed: {first_line(trial.failure)}"
    if trial is baseline or baseline.speed is None:
        return f"{head}: {_speed(trial.speed)} {terms.unit}"
    text = f"{head}: {_faster(trial.speed / baseline.speed - 1)}"
    what = effect(trial.setting, baseline.setting, space)
    text += f", with {what}" if what else ""
    if trial.predicted is not None and baseline.predicted is not None:
        predicted = _faster(trial.predicted / baseline.predicted - 1)
        text += f" (the simulator: {predicted})"
    return text


def line_of_round(trial: Trial, baseline: Trial, terms: Terms = DEFAULT_TERMS) -> str:
    """One line on a round; see `line_of_trial`."""
    number = len(trial.rounds) + bool(trial.failure)
    head = f"round {number}: {_name(trial, baseline, terms)}"
    if trial.failure:
        return f"{head}: failed: {first_line(trial.failure)}"
    return f"{head}: {_speed(trial.rounds[-1])} {terms.unit}"


def outcome(
    verdict: TuningResult, trials: Sequence[Trial], terms: Terms = DEFAULT_TERMS
) -> list[str]:
    """The end of the log: the winner and its gain; `trials`: the baseline first."""
    baseline, name = trials[0], terms.name
    failed = sum(1 for trial in trials if trial.speed is None)
    some = f", {failed} failed" if failed else ""
    lines = [f"{len(trials)} settings were tried{some}"]
    for setting, gain in verdict.gains.items():
        chance = "more than chance" if gain.is_beyond_chance else "that may be chance"
        chance = chance if gain.median > 0 else "no gain"
        lines.append(
            f"{changes_in_words(setting)}: {_faster(gain.median)} than {name} in the "
            f"median of {verdict.rounds} rounds, which differ by "
            f"{100 * gain.spread:.1f}%: {chance}"
        )
    if verdict.rounds < LEAST_ROUNDS and len(trials) > 1:
        lines.append(
            f"Too little was measured to prefer anything to {name}: give more time, or "
            "look at the failures."
        )
    if not verdict.gains:
        lines.append(f"Chosen: {name}; nothing was compared with it.")
        return lines
    if verdict.winner == baseline.setting:
        lines.append(f"Chosen: {name}; nothing is faster beyond chance.")
        return lines
    speeds = next(t.rounds for t in trials if t.setting == verdict.winner)
    lines.append(
        f"Chosen: {changes_in_words(verdict.winner)}; "
        f"{_speed(statistics.median(speeds))} against "
        f"{_speed(statistics.median(baseline.rounds))} {terms.unit}."
    )
    if verdict.winner.lossy is not None:
        lines.append(
            "It was tried for speed only: gradients are no longer exact. Check whether "
            "the model learns as well."
        )
    return lines


def _name(trial: Trial, baseline: Trial, terms: Terms) -> str:
    return terms.name if trial is baseline else changes_in_words(trial.setting)


def first_line(text: str) -> str:
    """The most informative line of a failure: an error's, or the last."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["no reason given"])[-1][:300]


def _faster(gain: float) -> str:
    if abs(gain) < 0.0005:
        return "as fast"
    return f"{100 * abs(gain):.1f}% {'faster' if gain > 0 else 'slower'}"


def _speed(each_second: float) -> str:
    return f"{each_second:,.1f}" if each_second >= 100 else f"{each_second:.3g}"
