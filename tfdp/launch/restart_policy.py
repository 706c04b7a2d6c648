"""Whether, when and where failed workers are restarted. Pure.

A failure uses up one allowed restart; a worker that has saved and requests a restart
uses none if training advanced. The same failure twice in a row without progress ends
the run. If fewer workers suffice, a place that failed twice in a row is dropped.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Sequence

from tfdp.cluster.progress import Progress

FIRST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0
FAILURES_OF_A_PLACE = 2  # failures in a row after which a place is dropped
# Ports, addresses and times change on a restart: ignored when comparing errors.
NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclasses.dataclass(frozen=True)
class Ending:
    """How one start of the workers failed, by the worker that failed first."""

    error: str  # type and message, or how it ended
    place: int | None = None  # where it ran, one of `Judge.places`; None: unknown
    worker: str = ""  # its name for messages; "" if there is no such worker
    from_outside: bool = False  # a signal killed it, or its machine was lost
    requests_restart: bool = False  # none failed; they have saved, and would resume
    progress: Progress = Progress()  # of all workers together

    def repeats(self, other: Ending) -> bool:
        return (
            self.requests_restart == other.requests_restart
            and self.from_outside == other.from_outside
            and NUMBER.sub("#", self.error) == NUMBER.sub("#", other.error)
        )


@dataclasses.dataclass(frozen=True)
class RestartDecision:
    """The decision after an ending."""

    restart: bool
    reason: str = ""  # why not, or what changes; may be ""
    wait_seconds: float = 0.0  # before the next start
    dropped: int | None = None  # the place that is left out from now on
    is_free: bool = False  # not one of the allowed restarts


def wait_seconds(fruitless: int, draw: Callable[[], float] = random.random) -> float:
    """Exponential backoff before a restart, up to a minute, with jitter.

        w = min(60, 2^(n - 1)) (1 + u) / 2,  u drawn from 0 to 1

    The jitter separates jobs that one fault stopped at the same time. `fruitless` is n,
    restarts in a row without progress, including this one; at least 1.
    """
    # A float overflows at 2 ** 1024.
    longest = FIRST_WAIT_SECONDS * 2.0 ** min(fruitless - 1, 60)
    return min(LONGEST_WAIT_SECONDS, longest) * (1 + draw()) / 2


def combine(notes: Sequence[Progress | None]) -> Progress:
    """Merges the notes of all workers: the newest save, the furthest step."""
    made = [note for note in notes if note is not None]
    resumed = [n for n in made if n.resumed_step is not None]
    saved = [n for n in made if n.saved_step is not None]
    # Training waited for the last worker to resume.
    last = max(resumed, key=lambda n: n.resumed_seconds or 0.0, default=Progress())
    newest = max(saved, key=lambda n: n.saved_step or 0, default=Progress())
    steps = [n.step for n in made if n.step is not None]
    return Progress(
        resumed_step=last.resumed_step,
        saved_step=newest.saved_step,
        step=max(steps, default=None),
        resumed_seconds=last.resumed_seconds,
        saved_seconds=newest.saved_seconds,
    )


class Judge:
    """Counts the failures of one launch and decides about restarts.

    `places` are numbers of places where workers can run, `least_workers` of which are
    needed; with `most_restarts` 0 nothing is restarted.
    """

    def __init__(self, places: Sequence[int], least_workers: int, most_restarts: int):
        self.places = list(places)
        self.least_workers, self.most_restarts = least_workers, most_restarts
        self.used_restarts = 0  # after a failure
        self.saved_step: int | None = None  # the newest
        self._reached_step: int | None = None
        self._last: Ending | None = None
        self._fruitless = self._in_a_row = 0

    def judge(self, ending: Ending) -> RestartDecision:
        got_further = self._update_progress(ending.progress)
        # The previous ending, unless there was progress since.
        last, self._last = None if got_further else self._last, ending
        self._fruitless = 1 if got_further else self._fruitless + 1
        in_same_place = last is not None and ending.place == last.place
        self._in_a_row = self._in_a_row + 1 if in_same_place else 1
        wait = wait_seconds(self._fruitless)
        if not self.most_restarts:
            return RestartDecision(False)
        if ending.requests_restart and got_further:
            return RestartDecision(True, wait_seconds=wait, is_free=True)
        if self.used_restarts >= self.most_restarts:
            most = self.most_restarts
            return RestartDecision(False, f"{most} of {most} restarts are used up")
        drops = ending.place is not None and (
            self._in_a_row >= FAILURES_OF_A_PLACE
            and len(self.places) > self.least_workers
        )
        if last is not None and not drops and _is_hopeless(ending, last):
            step = ending.progress.reached_step
            where = "" if step is None else f" at step {step}"
            reason = f"the same twice in a row{where}, with nothing gained: "
            return RestartDecision(False, reason + ending.error)
        self.used_restarts += 1
        if not drops:
            return RestartDecision(True, wait_seconds=wait)
        self.places = [place for place in self.places if place != ending.place]
        row, self._in_a_row = self._in_a_row, 0
        reason = f"has failed first {row} times in a row, and is left out"
        return RestartDecision(True, reason, wait, dropped=ending.place)

    def _update_progress(self, progress: Progress) -> bool:
        """Records the progress; whether it is further than ever before."""
        saved = _furthest(self.saved_step, progress.saved_step, progress.resumed_step)
        reached = _furthest(self._reached_step, progress.reached_step)
        before = (self.saved_step, self._reached_step)
        self.saved_step, self._reached_step = saved, reached
        return (saved, reached) != before


def _furthest(*steps: int | None) -> int | None:
    return max((step for step in steps if step is not None), default=None)


def _is_hopeless(ending: Ending, last: Ending) -> bool:
    """Whether two endings without progress in between predict a third.

    A signal, or the loss of a machine, is external and may happen twice; only at the
    same step in the same place is it the program's fault.
    """
    if not ending.repeats(last):
        return False
    if not (ending.from_outside or ending.requests_restart):
        return True
    step = ending.progress.reached_step
    is_same_step = step is not None and step == last.progress.reached_step
    return is_same_step and ending.place == last.place
