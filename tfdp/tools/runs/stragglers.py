"""Who was slow, how often, what it cost the others, and in what it was slow."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from tfdp.tools.runs.read import Run
from tfdp.tools.runs.together import (
    BETWEEN,
    COMPUTING,
    INPUT,
    Together,
    parts_of,
    steps_together,
)

__all__ = ["Straggler", "Stragglers", "find_stragglers"]

# Of the time of a step: who holds up the others by less is not called slow.
LEAST_SHARE = 0.05
OWN = (COMPUTING, INPUT, BETWEEN)


@dataclasses.dataclass(frozen=True)
class Straggler:
    """A worker for which others waited.

    Args:
      worker: its rank.
      share: of all steps, those in which it was the one.
      lost_seconds: that each of the others waited for it, on average.
      lost_share: the same, of the time of all steps.
      cause: what took it longer than the others: a name of a part; "": none stands out.
      more_share: by how much longer all that it did itself took it than the median of
        the others, in the steps in which it was the one.
    """

    worker: int
    share: float
    lost_seconds: float
    lost_share: float
    cause: str
    more_share: float


@dataclasses.dataclass(frozen=True)
class Stragglers:
    """What can be said of who was slow.

    Args:
      found: the one that cost most first.
      waited_seconds: by worker, for others.
      steps: that were looked at.
      unknown: why nothing can be said; "": it can.
    """

    found: Sequence[Straggler]
    waited_seconds: Mapping[int, float]
    steps: int
    unknown: str = ""


def find_stragglers(run: Run) -> Stragglers:
    """Who was slow in a run: the one that came last to exchanges, step by step.

    In a synchronous training all workers take as long for a step, the slow ones and
    those that wait for them; what tells them apart is how long each was in exchanges.
    """
    if all(session.first.start.workers == 1 for session in run.sessions):
        return Stragglers((), {}, 0, "There is one worker: nobody waits for another.")
    looked = [
        together
        for session in run.sessions
        for together in steps_together(session)
        if together.is_whole and not together.is_first
    ]
    known = [each for each in looked if each.waiting_seconds is not None]
    if not known:
        return Stragglers((), {}, 0, _why_unknown(run))
    seconds = sum(each.seconds for each in known)
    steps = sum(_steps(each) for each in known)
    slowest: dict[int, list[Together]] = collections.defaultdict(list)
    waited: dict[int, float] = collections.defaultdict(float)
    for each in known:
        waits = each.waiting_seconds or {}
        for rank, wait in waits.items():
            waited[rank] += wait
        rank = min(waits, key=lambda rank: waits[rank])
        if max(waits.values()) > LEAST_SHARE * each.seconds:
            slowest[rank].append(each)
    found = [_straggler(rank, mine, steps, seconds) for rank, mine in slowest.items()]
    found.sort(key=lambda straggler: -straggler.lost_seconds)
    return Stragglers(found, dict(sorted(waited.items())), steps)


def _steps(together: Together) -> int:
    return next(iter(together.lines.values())).steps


def _straggler(
    rank: int, mine: Sequence[Together], steps: int, seconds: float
) -> Straggler:
    lost = 0.0
    own: dict[int, dict[str, float]] = collections.defaultdict(
        lambda: dict.fromkeys(OWN, 0.0)
    )
    for each in mine:
        waits = each.waiting_seconds or {}
        lost += statistics.fmean(wait for r, wait in waits.items() if r != rank)
        for worker, line in each.lines.items():
            parts = parts_of(line, waits[worker], False)
            for part in OWN:
                own[worker][part] += parts[part]
    others = {
        part: statistics.median(own[r][part] for r in own if r != rank) for part in OWN
    }
    more = {part: own[rank][part] - others[part] for part in OWN}
    cause = max(more, key=lambda part: more[part])
    usual = sum(others.values())
    return Straggler(
        rank,
        sum(map(_steps, mine)) / steps if steps else 0.0,
        lost,
        lost / seconds if seconds else 0.0,
        cause if more[cause] > 0.5 * max(sum(more.values()), 1e-12) else "",
        sum(more.values()) / usual if usual else 0.0,
    )


def _why_unknown(run: Run) -> str:
    workers = max(len(session.workers) for session in run.sessions)
    if workers < 2:
        return (
            "Who was slow cannot be told: the file of one worker alone is here, and "
            "what tells is how long each one waited for the others."
        )
    return (
        "Who was slow cannot be told: how long exchanges between hosts lasted is known "
        'over sockets and MPI only (Communication(engine="sockets")), and of steps '
        "that at least two workers tell of."
    )
