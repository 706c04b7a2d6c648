"""The lines of all workers of a start side by side: the same steps, theirs each."""

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
#: Where the time of a worker goes, in the order in which it is drawn.
PARTS = (COMPUTING, SENDING, WAITING, INPUT, BETWEEN, VALIDATION, FIRST)


@dataclasses.dataclass(frozen=True)
class Together:
    """The same steps of all workers of a start that tell of them.

    Args:
      lines: by rank.
      is_first: whether TensorFlow traced in them.
      is_whole: whether all workers tell of them that tell of anything.
    """

    lines: Mapping[int, Steps]
    is_first: bool
    is_whole: bool

    @property
    def seconds(self) -> float:
        """How long they took: all workers go through steps together."""
        return max(line.seconds for line in self.lines.values())

    @property
    def training_seconds(self) -> float:
        """The same without validation."""
        return max(
            line.seconds - line.validation_seconds for line in self.lines.values()
        )

    @property
    def samples(self) -> int | None:
        """Of all workers that tell; None: one does not know."""
        found = [line.samples for line in self.lines.values()]
        known = [each for each in found if each is not None]
        return sum(known) if len(known) == len(found) else None

    @property
    def waiting_seconds(self) -> dict[int, float] | None:
        """How long each worker waited for the one that came last to exchanges.

        An exchange ends for all of them at about the same time, and who comes last is
        in it for the shortest. None: a worker does not know, or is alone.
        """
        found = {rank: line.exchange_seconds for rank, line in self.lines.items()}
        known = {rank: each for rank, each in found.items() if each is not None}
        if len(known) < len(found) or len(found) < 2:
            return None
        least = min(known.values())
        return {rank: each - least for rank, each in known.items()}


def steps_together(session: Session) -> Iterator[Together]:
    """The steps of a start, in their order."""
    by_step: dict[tuple[int, int], dict[int, Steps]] = collections.defaultdict(dict)
    for rank, worker in session.workers.items():
        for line in worker.steps:
            by_step[line.step, line.steps][rank] = line
    tell = sum(bool(worker.steps) for worker in session.workers.values())
    for (step, steps), lines in sorted(by_step.items()):
        yield Together(lines, step == steps, len(lines) == tell)


def parts_of(
    line: Steps, waiting_seconds: float | None, is_first: bool
) -> dict[str, float]:
    """Where the time of a line went; together its seconds.

    Args:
      line: of a worker.
      waiting_seconds: for other workers, of its time in exchanges; None: not known,
        all of it counts as exchanging.
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
