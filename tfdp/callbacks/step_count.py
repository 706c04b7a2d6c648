"""The steps of a `fit`, several of which Keras may make in one execution."""

from __future__ import annotations

__all__ = ["StepCount", "is_due"]


class StepCount:
    """Counts steps from what Keras tells callbacks: the first and last of each."""

    def __init__(self) -> None:
        #: How many were made.
        self.done = 0
        self._first = 0

    def begin(self, batch: int) -> None:
        """An execution begins with step `batch` of the epoch."""
        self._first = batch

    def end(self, batch: int) -> int:
        """It ends with step `batch`; how many were made before it began."""
        before = self.done
        self.done += batch - self._first + 1
        return before


def is_due(every: int, before: int, now: int) -> bool:
    """Whether there is a multiple of `every` above `before`, and up to `now`.

    >>> [is_due(3, before, before + 2) for before in (0, 1, 2, 3)]
    [False, True, True, False]
    """
    return now // every > before // every
