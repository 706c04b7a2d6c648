"""`StepClock`: when a step of `fit` begins, behind what callbacks do before it."""

from __future__ import annotations

import time
from typing import Any

import keras

__all__ = ["StepClock"]


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
        if self._step is not None:
            self._model.train_function = self._step

    def _clocked(self, *args: Any) -> Any:
        self.start()
        return self._step(*args)
