"""Which worker makes the others wait, and why, from the times of some steps. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TypeAlias

#: The columns of a table of one step, a row per worker: seconds, and rows.
#:
#: step       from the end of the sums of the step before to the end of this step's
#: input      that steps waited for their batches; with several steps in an execution a
#:            part of `step` only
#: compute    until its own gradients were ready, without input, and without waiting in
#:            exchanges before those of gradients
#: waiting    in exchanges with other workers, transfers included
#: sending    that its sends were blocked: by its link, or by a peer that does not read
#: arriving   that its data was under way, by the clocks of those that received it: from
#:            a block's first bytes to its last
#: rows       of its batches
COLUMNS = ("step", "input", "compute", "waiting", "sending", "arriving", "rows")
STEP, INPUT, COMPUTE, WAITING, SENDING, ARRIVING, ROWS = range(len(COLUMNS))

#: By cause, where the worker is slow.
IN_WORDS = {
    "input": "in its input",
    "compute": "in its computation",
    "link": "on its network link",
}
CAUSES = tuple(IN_WORDS)

# A worker that delays the others by less of a step is no straggler.
LEAST_SHARE = 0.1
# It delays them in so many of the steps: of equal workers, one in 8 of 10 by a chance
# of 5%. Not a multiple of the deviation, which is large where a processor is taken away
# for some time in most steps.
LEAST_STEPS = 0.75
# The part of the largest delay from which on slow computation is behind that, too.
LEAST_PART = 1 / 3

Table: TypeAlias = Sequence[Sequence[float]]  # by worker and column


@dataclasses.dataclass(frozen=True)
class SlowWorker:
    """A worker for which the others wait."""

    step: int  # the last one that was examined, from 0
    worker: int
    cause: str  # one of CAUSES
    lost_seconds: float  # in each step, by each of the others
    lost_share: float  # of a step
    to_best: float  # its busy time over that of the fastest worker
    to_own_best: float  # and over its own least so far

    def __str__(self) -> str:
        return (
            f"worker {self.worker} is slow, mostly {IN_WORDS[self.cause]}: it needs "
            f"{self.to_best:.1f} times the fastest worker's time for a step "
            f"({self.to_own_best:.1f} times its own best), and each of the others "
            f"waits {self.lost_seconds * 1e3:.3g} ms for it, {self.lost_share:.0%} of "
            "a step"
        )


def busy_seconds(table: Table) -> list[tuple[float, float, float]]:
    """How long each worker was busy in a step, by cause."""
    own = [max(0.0, row[STEP] - row[WAITING]) for row in table]
    latest = max(own)
    found = []
    for row, seconds in zip(table, own, strict=True):
        waited = min(row[INPUT], seconds)
        # A peer that is not there yet does not read: so long no link is to blame.
        blocked = max(0.0, row[SENDING] - (latest - seconds))
        found.append((waited, seconds - waited, max(blocked, row[ARRIVING])))
    return found


class Scores:
    """Finds the straggler of some steps, and remembers each worker's best."""

    def __init__(self, workers: int):
        self._best = [float("inf")] * workers

    def slowest(self, step: int, tables: Sequence[Table]) -> SlowWorker | None:
        """The worker that costs the others most in these steps, up to `step`; None:
        none costs them a tenth of a step, or more than chance does."""
        busy = list(map(busy_seconds, tables))
        totals = [[sum(each) for each in of_step] for of_step in busy]
        usual = [statistics.median(column) for column in zip(*totals, strict=True)]
        self._best = list(map(min, self._best, usual))
        excess = [above_others(of_step) for of_step in totals]
        lost = [statistics.median(column) for column in zip(*excess, strict=True)]
        worker = max(range(len(lost)), key=lambda rank: lost[rank])
        seconds = statistics.median(max(row[STEP] for row in t) for t in tables)
        late = sum(own[worker] > 0 for own in excess)
        is_rare = late < LEAST_STEPS * len(tables)
        if is_rare or lost[worker] < max(LEAST_SHARE * seconds, 1e-9):
            return None
        more = {
            cause: statistics.median(
                above_others([each[place] for each in of_step])[worker]
                for of_step in busy
            )
            for place, cause in enumerate(CAUSES)
        }
        cause = max(more, key=lambda cause: more[cause])
        # A busy processor delays input and sends, too, and they do not delay it.
        if more["compute"] > LEAST_PART * more[cause]:
            cause = "compute"
        return SlowWorker(
            step,
            worker,
            cause,
            lost[worker],
            lost[worker] / seconds,
            usual[worker] / max(min(usual), 1e-9),
            usual[worker] / max(self._best[worker], 1e-9),
        )


def above_others(values: Sequence[float]) -> list[float]:
    """The excess of each of at least two values over the median of the others."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    middle = (len(values) - 2) // 2, (len(values) - 1) // 2  # places among the others
    found = [0.0] * len(values)
    for place, index in enumerate(order):
        others = [values[order[at + (at >= place)]] for at in middle]
        found[index] = values[index] - sum(others) / 2
    return found
