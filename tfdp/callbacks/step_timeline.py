"""`StepTimeline`: one step of `fit` as a picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras

from tfdp._tf.keras_optimizers import names_of_updates
from tfdp._tf.step_trace import StepTrace
from tfdp.atomic_files import replaced
from tfdp.callbacks.timeline_page import draw_timeline, hidden_share, seconds_by_kind
from tfdp.errors import ConfigurationError

__all__ = ["StepTimeline"]


class StepTimeline(keras.callbacks.Callback):
    """Draws what every thread did in one training step: exchanges, update, the rest.

    Shows whether gradients and weights travel while the model computes. Prints the path
    of the page, how much of the exchanges' time was hidden behind computing, and how
    long the weights' update took on all threads together.

    Args:
      path: of the HTML page to write.
      step: the training step to draw, counted from 1; the first ones are slower than
        the rest, because TensorFlow traces and warms up. At least 2.

    Raises:
      ConfigurationError: when `step` is below 2.

    Cost: the one step is a little slower. On GPUs it shows what the host's threads did,
    not the kernels (TensorBoard's profiler does).

    ```python
    import pathlib
    import tempfile

    import keras
    import numpy as np
    import tfdp

    with tfdp.DataParallelStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    page = pathlib.Path(tempfile.mkdtemp(), "timeline.html")
    timeline = tfdp.callbacks.StepTimeline(page)
    x = np.zeros((64, 4), "float32")
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[timeline])
    ```
    """

    def __init__(self, path: str | os.PathLike[str] = "timeline.html", step: int = 5):
        super().__init__()
        if isinstance(step, bool) or not isinstance(step, int) or step < 2:
            raise ConfigurationError(
                "step must be a whole number of at least 2: in the first step "
                f"TensorFlow traces the model. Received: {step!r}."
            )
        self.path = Path(path)
        self.step = step
        #: The share of the exchanges' time in which another thread computed; None
        #: before the step, and without exchanges.
        self.hidden_share: float | None = None
        #: Seconds on all threads together by kind of op; empty before the step. On
        #: GPUs the host's: what launches took, not kernels.
        self.seconds: dict[str, float] = {}
        self._trace: StepTrace | None = None
        self._steps = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Starts the trace before its step."""
        self._steps += 1
        if self._steps == self.step:
            self._trace = StepTrace()
            self._trace.start()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Draws the step that was traced."""
        if self._trace is None:
            return
        events, self._trace = self._trace.stop(), None
        if not events:
            return
        self.hidden_share = hidden_share(events)
        optimizers = names_of_updates(self.model)
        self.seconds = seconds_by_kind(events, optimizers)
        page = draw_timeline(events, f"Training step {self.step}", optimizers)
        with replaced(self.path) as half_written:
            half_written.write_text(page, encoding="utf-8")
        share = self.hidden_share
        hidden = "" if share is None else f"; {share:.0%} of the exchanges are hidden"
        update_ms = self.seconds["update of weights"] * 1e3
        print(
            f"\ntimeline of step {self.step}: {self.path}{hidden}; update of weights: "
            f"{update_ms:.1f} ms on all threads together"
        )
