"""`StepTimeline`: a step of `fit` as a picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras

from tfdp._private.step_trace import StepTrace
from tfdp.callbacks.timeline_page import draw_timeline, hidden_share, seconds_by_kind
from tfdp.checks import is_whole
from tfdp.errors import ConfigurationError
from tfdp.files.atomic import replaced
from tfdp.step.optimizers import names_of_updates

__all__ = ["StepTimeline"]


class StepTimeline(keras.callbacks.Callback):
    """Draws what every thread did in one training step: exchanges, update, the rest.

    Shows whether gradients and weights travel while the model computes. Prints the path
    of the page, how much of the exchanges' time was hidden behind computing, and how
    long the weights' update took on all threads together.

    Args:
      path: of the HTML page to write.
      step: the training step to draw, counted from 1; the first ones are slower than
        the rest, because TensorFlow traces and warms up. At least 2. With
        `steps_per_execution=K` the K steps are drawn that run together with it; if
        those are the very first, in which TensorFlow traces, the K steps after them.

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
        if not is_whole(step, least=2):
            raise ConfigurationError(
                "step must be a whole number of at least 2: in the first step "
                f"TensorFlow traces the model. Received: {step!r}."
            )
        self.path = Path(path)
        self.step = step
        #: The share of the exchanges' time in which another thread computed; None
        #: before the step, and without exchanges.
        self.hidden_share: float | None = None
        #: Seconds per step on all threads together by kind of op; empty before the
        #: step. On GPUs the host's: what launches took, not kernels.
        self.seconds: dict[str, float] = {}
        #: The steps that were drawn, the first and the last; None before.
        self.drawn_steps: tuple[int, int] | None = None
        self._trace: StepTrace | None = None
        self._steps_before = 0
        self._steps_together = 1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Starts the trace before its step."""
        self._steps_together = self._steps_of_execution(batch)
        reached = self._steps_before + self._steps_together
        is_first = self._steps_before == 0
        if not is_first and reached >= self.step and self.drawn_steps is None:
            self.drawn_steps = (self._steps_before + 1, reached)
            self._trace = StepTrace()
            self._trace.start()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Draws the steps that were traced."""
        self._steps_before += self._steps_together
        if self._trace is None or self.drawn_steps is None:
            return
        events, self._trace = self._trace.stop(), None
        if not events:
            return
        self.hidden_share = hidden_share(events)
        optimizers = names_of_updates(self.model)
        first, last = self.drawn_steps
        together = last - first + 1
        self.seconds = {
            kind: seconds / together
            for kind, seconds in seconds_by_kind(events, optimizers).items()
        }
        steps = f"step {first}" if together == 1 else f"steps {first} to {last}"
        page = draw_timeline(events, f"Training {steps}", optimizers)
        with replaced(self.path) as half_written:
            half_written.write_text(page, encoding="utf-8")
        share = self.hidden_share
        hidden = "" if share is None else f"; {share:.0%} of the exchanges are hidden"
        update_ms = self.seconds["update of weights"] * 1e3
        print(
            f"\ntimeline of {steps}: {self.path}{hidden}; update of weights: "
            f"{update_ms:.1f} ms per step on all threads together"
        )

    def _steps_of_execution(self, batch: int) -> int:
        """How many steps run until the next end; the last ones may be fewer."""
        together = self.model.steps_per_execution
        steps = (self.params or {}).get("steps")
        return together if steps is None else max(1, min(together, steps - batch))
