"""Aligns the lines of all workers of a start, step by step."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping

from tfdp.tools.runs.entries import Steps
from tfdp.tools.runs.read import Session

FIRST = "first step"
INPUT = "waiting for input"
COMPUTING = "computing"
SENDING = "exchanging"
WAITING = "waiting for workers"
BETWEEN = "between steps"
VALIDATION = "validation"
#: The parts of a worker's time, in the order of drawing.
PARTS = (COMPUTING, SENDING, WAITING, INPUT, BETWEEN, VALIDATION, FIRST)


@dataclasses.dataclass(frozen=True)
class AlignedSteps:
    """The same steps on all workers that recorded them."""

    lines: Mapping[int, Steps]  # by rank
    is_first: bool  # TensorFlow traced in them
    is_whole: bool  # all workers with a record recorded them

    @property
    def seconds(self) -> float:
        """How long they took: all workers run steps in lockstep."""
        return max(line.seconds for line in self.lines.values())

    @property
    def training_seconds(self) -> float:
        return max(s.seconds - s.validation_seconds for s in self.lines.values())

    @property
    def samples(self) -> int | None:
        """Samples of all recorded workers; None: unknown for one of them."""
        found = [line.samples for line in self.lines.values()]
        return None if None in found else sum(found)  # type: ignore[arg-type]

    @property
    def waiting_seconds(self) -> dict[int, float] | None:
        """How long each worker waited for the last one to enter exchanges.

        An exchange ends on all workers at about the same time, so the last to enter
        spends the least time in it. None: unknown for one worker, or there is only one.
        """
        found = {rank: line.exchange_seconds for rank, line in self.lines.items()}
        known = {rank: each for rank, each in found.items() if each is not None}
        if len(known) < len(found) or len(found) < 2:
            return None
        least = min(known.values())
        return {rank: each - least for rank, each in known.items()}


def aligned_steps(session: Session) -> Iterator[AlignedSteps]:
    """The steps of a start, in order."""
    by_step: dict[tuple[int, int], dict[int, Steps]] = collections.defaultdict(dict)
    for rank, worker in session.workers.items():
        for line in worker.steps:
            by_step[line.step, line.steps][rank] = line
    recorded = sum(bool(worker.steps) for worker in session.workers.values())
    for (step, steps), lines in sorted(by_step.items()):
        yield AlignedSteps(lines, step == steps, len(lines) == recorded)


def parts_of(
    line: Steps, waiting_seconds: float | None, is_first: bool
) -> dict[str, float]:
    """Splits the time of a line into parts, which add up to its seconds.

    Args:
      line: of a worker.
      waiting_seconds: of its exchange time, spent waiting for other workers; None:
        unknown, and all of it counts as exchanging.
      is_first: whether TensorFlow traced in it.
    """
    within = min(line.step_seconds, line.seconds)
    if is_first:
        parts = {FIRST: within}
    else:
        waited = min(line.input_seconds or 0.0, within)
        exchange = min(line.exchange_seconds or 0.0, within - waited)
        waiting = min(waiting_seconds or 0.0, exchange)
        parts = {
            INPUT: waited,
            WAITING: waiting,
            SENDING: exchange - waiting,
            COMPUTING: within - waited - exchange,
        }
    rest = line.seconds - within
    validation = min(line.validation_seconds, rest)
    return {**parts, VALIDATION: validation, BETWEEN: rest - validation}
