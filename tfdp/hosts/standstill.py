"""Notices that this process did not run for a while.

A process that was stopped (SIGSTOP, a debugger) or whose machine slept finds, on
waking, that it has heard of nobody for long. That says nothing about the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Standstill", "boot_seconds"]


class Standstill:
    """A thread that looks at it again and again learns when it could not.

    Args:
      usual_seconds: the longest time between two looks of a thread that runs.
      clock: seconds, also of a machine that sleeps.
    """

    def __init__(self, usual_seconds: float, clock: Callable[[], float] | None = None):
        self._usual_seconds = usual_seconds
        self._clock = clock or boot_seconds
        self._last_look = self._clock()
        self._seconds = 0.0
        self._end = float("-inf")

    def look(self) -> float:
        """How much longer than usual the last look is ago, in seconds; 0 as a rule."""
        now = self._clock()
        missed = max(now - self._last_look - self._usual_seconds, 0.0)
        if missed:
            self._seconds, self._end = now - self._last_look, now
        self._last_look = now
        return missed

    def seconds_within(self, recent_seconds: float) -> float:
        """How long the last standstill was, if it ended within so many seconds; or 0.

        One that lasts to this moment, unseen by the thread, counts.
        """
        now = self._clock()
        if now - self._last_look > 2 * self._usual_seconds:
            return now - self._last_look
        return self._seconds if now - self._end <= recent_seconds else 0.0


def boot_seconds() -> float:
    """Seconds of a clock that runs on while the machine sleeps.

    `time.monotonic` stands still then, on Linux as on macOS.
    """
    for name in ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"):
        if hasattr(time, name):
            return time.clock_gettime(getattr(time, name))
    return time.monotonic()
