"""The steps of a `fit`, several of which Keras may make in one execution."""

from __future__ import annotations

import time
import warnings
from typing import Any

import keras

from tfdp._private.frames import fits_around
from tfdp.errors import RunRecordWarning


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


# `StepClock`: when a step of `fit` begins, behind what callbacks do before it.


def warn_unless_first(callback: keras.callbacks.Callback) -> None:
    """Warns where other callbacks of the `fit` that calls it come before `callback`.

    What they do after a step is over is then done within what `callback` times.
    """
    callbacks = getattr(next(fits_around(), {}).get("callbacks"), "callbacks", [])
    if callbacks and callbacks[0] is not callback:
        name, before = type(callback).__name__, type(callbacks[0]).__name__
        warnings.warn(
            f"{name} comes behind {before} in callbacks=, so what {before} does after "
            f"a step is recorded as a part of the step. Place {name} first.",
            RunRecordWarning,
            stacklevel=3,
        )


class StepClock:
    """Leads what `fit` calls for a step, `model.train_function`, to note the time.

    Args:
      model: whose step it is; it gets its own back by `close`.
    """

    def __init__(self, model: keras.Model):
        self._model, self._step = model, model.train_function
        #: When the last step began, by `time.perf_counter` and by the computer's clock,
        #: the only one that what runs in a graph knows.
        self.began = self.began_by_clock = 0.0
        if self._step is not None:
            model.train_function = self._clocked

    def start(self) -> None:
        """A step begins."""
        self.began, self.began_by_clock = time.perf_counter(), time.time()

    def close(self) -> None:
        """Leads no more."""
        # Another callback may lead it meanwhile, or have built it anew.
        if self._model.train_function == self._clocked:
            self._model.train_function = self._step

    def _clocked(self, *args: Any) -> Any:
        self.start()
        return self._step(*args)
