"""The steps of a `fit`, several of which Keras may run in one execution."""

from __future__ import annotations

import time
import warnings
from typing import Any

import keras

from tfdp._private.frames import fits_around
from tfdp.checks import check_whole
from tfdp.errors import RunRecordWarning


class StepCount:
    """Counts steps from the batch numbers that Keras passes to callbacks."""

    def __init__(self) -> None:
        #: Steps made.
        self.done = 0
        self._first = 0

    def begin(self, batch: int) -> None:
        """An execution begins with step `batch` of the epoch."""
        self._first = batch

    def end(self, batch: int) -> int:
        """An execution ends with step `batch`; returns the steps made before it."""
        before = self.done
        self.done += batch - self._first + 1
        return before


def check_count(name: str, value: Any) -> None:
    """Refuses a `value` other than None and whole numbers from 1."""
    if value is not None:
        check_whole(name, value, least=1, why=", or None")


def is_due(every: int, before: int, now: int) -> bool:
    """Whether a multiple of `every` is above `before`, and up to `now`.

    >>> [is_due(3, before, before + 2) for before in (0, 1, 2, 3)]
    [False, True, True, False]
    """
    return now // every > before // every


def warn_unless_first(callback: keras.callbacks.Callback) -> None:
    """Warns if other callbacks of the calling `fit` come before `callback`.

    What they do after a step falls into the time that `callback` measures.
    """
    around = next(fits_around(), None)
    callbacks = [] if around is None else around.callbacks
    if callbacks and callbacks[0] is not callback:
        name, before = type(callback).__name__, type(callbacks[0]).__name__
        warnings.warn(
            f"{name} comes after {before} in callbacks=, so the time of {before} "
            f"counts as a part of the step. Place {name} first.",
            RunRecordWarning,
            stacklevel=3,
        )


class StepClock:
    """Overrides `model.train_function` to record when each step of `fit` begins."""

    def __init__(self, model: keras.Model):
        self._model, self._step = model, model.train_function
        #: When the last step began, by `time.perf_counter` and by the system clock.
        self.began = self.began_by_clock = 0.0
        if self._step is not None:
            model.train_function = self._clocked

    def start(self) -> None:
        """Records the beginning of a step."""
        self.began, self.began_by_clock = time.perf_counter(), time.time()

    def close(self) -> None:
        """Restores the original function."""
        # Another callback may have overridden or rebuilt it.
        if self._model.train_function == self._clocked:
            self._model.train_function = self._step

    def _clocked(self, *args: Any) -> Any:
        self.start()
        return self._step(*args)
