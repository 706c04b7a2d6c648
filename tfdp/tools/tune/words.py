"""The trials as an explanation: what was tried, what came of it, and what is chosen."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from tfdp.tools.tune.space import Setting, Space, bytes_in_words
from tfdp.tools.tune.tuning import LEAST_ROUNDS, Trial, Verdict

ENGINES = {
    "in_process": "replicas hand tensors to each other (engine in_process)",
    "tensorflow": "TensorFlow's collectives (engine tensorflow)",
    "sockets": "sums over sockets",
}


@dataclasses.dataclass(frozen=True)
class Terms:
    """What the baseline and the speeds are called.

    Args:
      name: of the baseline.
      unit: of the speeds.
    """

    name: str = "the defaults"
    unit: str = "samples/s"


DEFAULT_TERMS = Terms()


def changes_in_words(setting: Setting) -> str:
    """What is not as in the defaults.

    >>> changes_in_words(Setting(bucket_bytes=4 << 20, remat=True))
    'buckets of 4 MiB, remat'
    >>> changes_in_words(Setting())
    'the defaults'
    """
    said = []
    for name, value in setting.changes.items():
        if name == "bucket_bytes":
            said.append(f"buckets of {bytes_in_words(value)}")
        elif name == "first_bucket_bytes":
            said.append(f"first and last of {bytes_in_words(value)}")
        elif name == "hierarchy":
            said.append(f"levels of {value[0]} x {value[1]}")
        elif name == "lossy":
            said.append(f"gradients as {value}")
        elif name == "shard":
            said.append(f"shard={value!r}")
        elif name == "accumulation_steps":
            said.append(f"the batch in {value} steps")
        else:
            said.append("remat" if name == "remat" else ENGINES.get(value, value))
    return ", ".join(said) or "the defaults"


def effect(setting: Setting, baseline: Setting, space: Space) -> str:
    """What the setting does otherwise than the baseline, in what can be counted."""
    said = []
    mine, theirs = space.buckets(setting), space.buckets(baseline)
    if mine and len(mine) != len(theirs):
        more = len(mine) - len(theirs)
        said.append(
            f"{abs(more)} {'launches' if abs(more) > 1 else 'launch'} "
            f"{'more' if more > 0 else 'fewer'} a step ({len(mine)}, not "
            f"{len(theirs)})"
        )
    elif mine != theirs:
        largest = [
            max(bucket.size_bytes or 0 for bucket in each) for each in (mine, theirs)
        ]
        said.append(
            f"as many launches of other sizes: the largest {_bytes(largest[0])}, not "
            f"{_bytes(largest[1])}"
        )
    if setting.lossy != baseline.lossy:
        said.append("fewer bytes between hosts, and other numbers")
    if setting.shard != baseline.shard:
        said.append(f"replicas hold parts of {_what(setting.shard)}")
    if setting.remat and not baseline.remat:
        said.append("the forward pass is computed twice")
    if setting.accumulation_steps > baseline.accumulation_steps:
        said.append("fewer rows at a time")
    return "; ".join(said)


def line_of_trial(
    number: int,
    trial: Trial,
    baseline: Trial,
    space: Space,
    terms: Terms = DEFAULT_TERMS,
) -> str:
    """One line: what was tried, and what came of it.

    Args:
      number: of the trial, 0 for the baseline.
      trial: it.
      baseline: what it is compared with.
      space: knows the buckets.
      terms: what the baseline and the speeds are called.
    """
    head = f"trial {number}: {_said(trial, baseline, terms)}"
    if trial.speed is None:
        return f"{head}: failed: {first_line(trial.failure)}"
    if trial is baseline or baseline.speed is None:
        return f"{head}: {_speed(trial.speed)} {terms.unit}"
    said = f"{head}: {_faster(trial.speed / baseline.speed - 1)}"
    what = effect(trial.setting, baseline.setting, space)
    said += f", with {what}" if what else ""
    if trial.predicted is not None and baseline.predicted is not None:
        predicted = _faster(trial.predicted / baseline.predicted - 1)
        said += f" (the simulator: {predicted})"
    return said


def line_of_round(trial: Trial, baseline: Trial, terms: Terms = DEFAULT_TERMS) -> str:
    """One line of a round; see `line_of_trial`."""
    number = len(trial.rounds) + bool(trial.failure)
    head = f"round {number}: {_said(trial, baseline, terms)}"
    if trial.failure:
        return f"{head}: failed: {first_line(trial.failure)}"
    return f"{head}: {_speed(trial.rounds[-1])} {terms.unit}"


def outcome(
    verdict: Verdict, trials: Sequence[Trial], terms: Terms = DEFAULT_TERMS
) -> list[str]:
    """The end of the log: who won, and by how much.

    Args:
      verdict: of the rounds.
      trials: all, the baseline first.
      terms: what the baseline and the speeds are called.
    """
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
            "It was tried for speed alone: gradients are no longer exact, and whether "
            "the model learns as well is for you to see."
        )
    return lines


def _said(trial: Trial, baseline: Trial, terms: Terms) -> str:
    return terms.name if trial is baseline else changes_in_words(trial.setting)


def first_line(text: str) -> str:
    """The line of a failure that says most: an error's, or the last."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["no reason was told"])[-1][:300]


def _faster(gain: float) -> str:
    """
    >>> _faster(0.034), _faster(-0.5), _faster(0.0004)
    ('3.4% faster', '50.0% slower', 'as fast')
    """
    if abs(gain) < 0.0005:
        return "as fast"
    return f"{100 * abs(gain):.1f}% {'faster' if gain > 0 else 'slower'}"


def _speed(each_second: float) -> str:
    """
    >>> _speed(1234.56), _speed(0.12345)
    ('1,234.6', '0.123')
    """
    return f"{each_second:,.1f}" if each_second >= 100 else f"{each_second:.3g}"


def _bytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.2f} MB"


def _what(shard: str) -> str:
    return {
        "optimizer": "the optimizer's state",
        "gradients": "gradients and the optimizer's state",
        "parameters": "weights, gradients and the optimizer's state",
    }.get(shard, "nothing")
