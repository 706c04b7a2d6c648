"""Whether, when and where workers that have failed start again. Pure.

A failure costs one of the restarts that were allowed; a worker that has saved and asks
to be started again (its machine is wanted back) costs none while the training gets
further in between. The same failure twice in a row, with nothing gained between, would
come a third time, too: it ends the run. Where fewer workers will do, a place that has
failed twice in a row is left out instead.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Sequence

from tfdp.cluster.progress import Progress

FIRST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0
# How often in a row a place may fail before others go on without it.
FAILURES_OF_A_PLACE = 2
# Ports, addresses and times are others after a restart; what failed is the same.
NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclasses.dataclass(frozen=True)
class Ending:
    """How one start of the workers ended, not well.

    Args:
      error: of the worker that failed first: type and message, or how it ended.
      place: where it ran, one of `Judge.places`; None: nobody knows where the cause is.
      who: its name, for messages; "" where there is no such worker.
      from_outside: a signal killed it, or its machine was lost: no error of its own.
      requests_restart: nobody failed; the workers have saved, and would go on.
      progress: of all workers together.
    """

    error: str
    place: int | None = None
    who: str = ""
    from_outside: bool = False
    requests_restart: bool = False
    progress: Progress = Progress()

    def repeats(self, other: Ending) -> bool:
        """Whether this looks like the same thing once more, without its numbers."""
        return (
            self.requests_restart == other.requests_restart
            and self.from_outside == other.from_outside
            and NUMBER.sub("#", self.error) == NUMBER.sub("#", other.error)
        )


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What follows from an ending.

    Args:
      restart: whether the workers start again.
      reason: why not, or what changes; "" where there is nothing to say.
      wait_seconds: before the next start.
      dropped: the place that is left out from now on.
      is_free: whether this restart costs none of those that were allowed.
    """

    restart: bool
    reason: str = ""
    wait_seconds: float = 0.0
    dropped: int | None = None
    is_free: bool = False


def wait_seconds(fruitless: int, draw: Callable[[], float] = random.random) -> float:
    """The wait before a restart, doubled each time up to a minute, in part by chance.

        w = min(60, 2^(n - 1)) (1 + u) / 2,  u drawn from 0 to 1

    The chance keeps jobs apart that one fault has stopped all at once.

    Args:
      fruitless: n, restarts in a row without progress between, this one included; at
        least 1.
      draw: a number from 0 to 1.

    >>> [wait_seconds(n, lambda: 1.0) for n in (1, 2, 3, 9)]
    [1.0, 2.0, 4.0, 60.0]
    """
    # A float overflows at 2 ** 1024.
    longest = FIRST_WAIT_SECONDS * 2.0 ** min(fruitless - 1, 60)
    return min(LONGEST_WAIT_SECONDS, longest) * (1 + draw()) / 2


def combine(notes: Sequence[Progress | None]) -> Progress:
    """What all workers together have noted: the newest save, the furthest step.

    Args:
      notes: one per worker.
    """
    known = [note for note in notes if note is not None]
    resumed = [n for n in known if n.resumed_step is not None]
    saved = [n for n in known if n.saved_step is not None]
    # The last to come back is the one that training waited for.
    last = max(resumed, key=lambda n: n.resumed_seconds or 0.0, default=Progress())
    newest = max(saved, key=lambda n: n.saved_step or 0, default=Progress())
    steps = [n.step for n in known if n.step is not None]
    return Progress(
        resumed_step=last.resumed_step,
        saved_step=newest.saved_step,
        step=max(steps, default=None),
        resumed_seconds=last.resumed_seconds,
        saved_seconds=newest.saved_seconds,
    )


class Judge:
    """Keeps count of the endings of one launch.

    Args:
      places: where workers can run, by number.
      least_workers: with how many it may go on, at least 1.
      most_restarts: how many failures may be followed by a restart; 0: nothing is.
    """

    def __init__(self, places: Sequence[int], least_workers: int, most_restarts: int):
        self.places = list(places)
        self.least_workers = least_workers
        self.most_restarts = most_restarts
        #: Restarts for which a failure has paid.
        self.used_restarts = 0
        #: The newest step that is known to be saved.
        self.saved_step: int | None = None
        self._reached_step: int | None = None
        self._fruitless = 0
        self._last: Ending | None = None
        self._in_a_row = 0

    def judge(self, ending: Ending) -> Verdict:
        """What follows from the ending of the newest start."""
        got_further = self._take_note_of(ending.progress)
        # The one before, as far as nothing was gained since.
        last, self._last = None if got_further else self._last, ending
        self._fruitless = 1 if got_further else self._fruitless + 1
        in_same_place = last is not None and ending.place == last.place
        self._in_a_row = self._in_a_row + 1 if in_same_place else 1
        wait = wait_seconds(self._fruitless)
        if not self.most_restarts:
            return Verdict(False)
        if ending.requests_restart and got_further:
            return Verdict(True, wait_seconds=wait, is_free=True)
        if self.used_restarts >= self.most_restarts:
            most = self.most_restarts
            return Verdict(False, f"{most} of {most} restarts are used up")
        drops = ending.place is not None and (
            self._in_a_row >= FAILURES_OF_A_PLACE
            and len(self.places) > self.least_workers
        )
        if last is not None and not drops and _is_hopeless(ending, last):
            return Verdict(False, _same_again(ending))
        self.used_restarts += 1
        if not drops:
            return Verdict(True, wait_seconds=wait)
        self.places = [place for place in self.places if place != ending.place]
        row, self._in_a_row = self._in_a_row, 0
        reason = f"has failed first {row} times in a row, and is left out"
        return Verdict(True, reason, wait, dropped=ending.place)

    def _take_note_of(self, progress: Progress) -> bool:
        """Remembers how far it came; whether that was further than ever before."""
        saved = _furthest(self.saved_step, progress.saved_step, progress.resumed_step)
        reached = _furthest(self._reached_step, progress.reached_step)
        before = (self.saved_step, self._reached_step)
        self.saved_step, self._reached_step = saved, reached
        return (saved, reached) != before


def _furthest(*steps: int | None) -> int | None:
    return max((step for step in steps if step is not None), default=None)


def _is_hopeless(ending: Ending, last: Ending) -> bool:
    """Whether two endings, with nothing gained between, would be followed by a third.

    A signal, or the loss of a machine, comes from outside and may come twice: only at
    the very same step, in the same place, is it the program's own doing.
    """
    if not ending.repeats(last):
        return False
    if not (ending.from_outside or ending.requests_restart):
        return True
    step = ending.progress.reached_step
    is_same_step = step is not None and step == last.progress.reached_step
    return is_same_step and ending.place == last.place


def _same_again(ending: Ending) -> str:
    step = ending.progress.reached_step
    where = "" if step is None else f" at step {step}"
    return f"the same twice in a row{where}, with nothing gained: {ending.error}"
