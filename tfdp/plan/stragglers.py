"""Which worker makes the others wait, and why, from the times of some steps. Pure.

A synchronous step takes equally long on all workers, slow or waiting; they differ in
how much of it they waited. With the time s of a step, the time w in exchanges, and
the time l for which data of the worker was under way, worker r was busy for

    b_r = s_r - w_r + l_r

and the others wait for it for b_r less the median of the others' b, in each step.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TypeAlias

#: The columns of a table of one step, which has a row for each worker: rows of the
#: batch, else seconds.
#:
#: step       from the end of the sums of the step before to the end of this step's
#: input      that steps waited for their batches
#: compute    until the worker's own gradients were ready, without input, and without
#:            waiting for exchanges that come before those of gradients
#: waiting    in exchanges with other workers, their transfers included
#: sending    that the worker's sends were blocked: by its link, or by a peer that does
#:            not read yet
#: arriving   that blocks of data were under way from this worker to its peers, by the
#:            clocks of the peers, from a block's first bytes to its last
#: rows       of the worker's batches
COLUMNS = ("step", "input", "compute", "waiting", "sending", "arriving", "rows")
STEP, INPUT, COMPUTE, WAITING, SENDING, ARRIVING, ROWS = range(len(COLUMNS))

#: The causes, in the order of `Busy`.
CAUSES = ("input", "compute", "link")

# A worker that delays the others by less of a step is no straggler.
LEAST_SHARE = 0.1
# The median of a normal distribution's absolute deviations, times this, is its standard
# deviation.
MAD_TO_DEVIATION = 1.4826
# A delay is above chance from this many standard errors of its median on.
LEAST_ERRORS = 3.0

Table: TypeAlias = Sequence[Sequence[float]]  # by worker and column
Busy: TypeAlias = tuple[float, float, float]  # by cause


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


IN_WORDS = {
    "input": "in its input",
    "compute": "in its computation",
    "link": "on its network link",
}


def busy_seconds(table: Table) -> list[Busy]:
    """How long each worker was busy in a step, by cause.

    >>> row = [10.0, 1.0, 6.0, 2.0, 0.0, 0.0, 8.0]
    >>> busy_seconds([row, [10.0, 1.0, 1.0, 7.0, 6.0, 0.5, 8.0]])
    [(1.0, 7.0, 0.0), (1.0, 2.0, 1.0)]
    """
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
        """The worker that costs the others most, in the steps up to `step`; None: none
        costs them a tenth of a step, or more than chance would."""
        busy = [busy_seconds(table) for table in tables]
        totals = [[sum(each) for each in of_step] for of_step in busy]
        usual = [statistics.median(column) for column in zip(*totals, strict=True)]
        self._best = list(map(min, self._best, usual))
        excess = [above_others(of_step) for of_step in totals]
        lost = [statistics.median(column) for column in zip(*excess, strict=True)]
        worker = max(range(len(lost)), key=lambda rank: lost[rank])
        seconds = statistics.median(max(row[STEP] for row in t) for t in tables)
        # The median of differences from the median, over the steps.
        spread = statistics.median(abs(own[worker] - lost[worker]) for own in excess)
        error = MAD_TO_DEVIATION * spread / len(tables) ** 0.5
        if lost[worker] < max(LEAST_SHARE * seconds, LEAST_ERRORS * error, 1e-9):
            return None
        more = [
            statistics.median(
                above_others([each[cause] for each in of_step])[worker]
                for of_step in busy
            )
            for cause in range(len(CAUSES))
        ]
        return SlowWorker(
            step,
            worker,
            CAUSES[max(range(len(CAUSES)), key=lambda cause: more[cause])],
            lost[worker],
            lost[worker] / seconds,
            usual[worker] / max(min(usual), 1e-9),
            usual[worker] / max(self._best[worker], 1e-9),
        )


def above_others(values: Sequence[float]) -> list[float]:
    """By how much each of at least two values exceeds the median of the others.

    >>> above_others([1.0, 2.0, 6.0])
    [-3.0, -1.5, 4.5]
    """
    order = sorted(range(len(values)), key=lambda place: values[place])
    middle = (len(values) - 2) // 2, (len(values) - 1) // 2  # places among the others
    found = [0.0] * len(values)
    for place, index in enumerate(order):
        others = [values[order[at + (at >= place)]] for at in middle]
        found[index] = values[index] - sum(others) / 2
    return found
