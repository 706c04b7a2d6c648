"""`StepTimeline`: traces one step of `fit`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.step_trace import StepTrace
from tfdp.checks import check_whole
from tfdp.errors import ConfigurationError
from tfdp.files.asked_for import check_output_path
from tfdp.files.atomic import replaced
from tfdp.step.find_optimizers import innermost_optimizers, optimizers_of
from tfdp.tools.runs import traces


class StepTimeline(keras.callbacks.Callback):
    """Traces what every thread did in one training step: exchanges, update, computing.

    Open https://ui.perfetto.dev and drop the file there to see the step, by replica and
    thread, and whether exchanges overlap computing. Prints the path of the file, the
    share of the exchange time in which another thread computed (also of another
    replica; `tfdp report` counts only the same replica's computing), and the duration
    of the weights' update on all threads together. It reports a training that ends
    before the step. On CPUs TensorFlow does not attribute all ops in a graph that
    replicas share: from 32 weights on the update, and from 3 replicas on all computing.
    TensorFlow has one profiler: while another callback uses it, nothing is written and
    a message explains it.

    Args:
      path: of the file to write, in Chrome's Trace Event Format; ends in `.trace.json`.
        On several hosts each writes its own: host 1 `timeline.host1.trace.json` for
        `timeline.trace.json`.
      step: the training step to trace, from 1, at least 2: the first steps are slower,
        because TensorFlow builds the graph and warms up. With `steps_per_execution=K`
        it traces the K steps of one execution, never the first one.

    Raises:
      ConfigurationError: `step` is below 2, or `path` has another ending; when training
        starts: `path` cannot be written.

    Cost: the one step is a little slower. On GPUs it shows the host's threads, not the
    kernels (TensorBoard's profiler does).

    ```python
    import pathlib
    import tempfile

    import keras
    import numpy as np
    import tfdp

    with tfdp.DataParallelStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    trace = pathlib.Path(tempfile.mkdtemp(), "timeline.trace.json")
    timeline = tfdp.callbacks.StepTimeline(trace)
    x = np.zeros((64, 4), "float32")
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[timeline])
    ```
    """

    def __init__(
        self, path: str | os.PathLike[str] = "timeline.trace.json", step: int = 5
    ):
        super().__init__()
        why = ": in the first step TensorFlow builds the graph"
        check_whole("step", step, least=2, why=why)
        #: The path of this host's file.
        self.path = Path(path)
        if not self.path.name.endswith(traces.ENDING):
            raise ConfigurationError(
                f"StepTimeline: path {path} must end in {traces.ENDING}, by which "
                "`tfdp report` finds it."
            )
        self.step = step
        #: Share of the exchange time in which another thread computed; None before the
        #: step, and without exchanges.
        self.hidden_share: float | None = None
        #: Seconds per step on all threads, by kind of op; empty before the step. On
        #: GPUs the time of launches, not of kernels.
        self.seconds: dict[str, float] = {}
        #: The first and the last step traced; None before.
        self.traced_steps: tuple[int, int] | None = None
        self._trace: StepTrace | None = None
        self._steps_before = 0
        self._steps_together = 1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Starts the trace before its step; raises ConfigurationError."""
        if not self._steps_before:
            # Not earlier: another callback may create the folder.
            check_output_path("StepTimeline: path", os.fspath(self.path))
        self._steps_together = self._steps_of_execution(batch)
        reached = self._steps_before + self._steps_together
        is_first = self._steps_before == 0
        if not is_first and reached >= self.step and self.traced_steps is None:
            self.traced_steps = (self._steps_before + 1, reached)
            self._trace = self._started_trace()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Writes the traced steps."""
        self._steps_before += self._steps_together
        if self._trace is None or self.traced_steps is None:
            return
        events, self._trace = self._trace.stop(), None
        if not events:
            return
        self.hidden_share = traces.hidden_share(events)
        # They update weights in name scopes of their names.
        owners = optimizers_of(self.model)
        optimizers = [one.name for o in owners for one in innermost_optimizers(o)]
        first, last = self.traced_steps
        together = last - first + 1
        seconds = traces.seconds_by_kind(events, optimizers)
        self.seconds = {kind: each / together for kind, each in seconds.items()}
        steps = f"step {first}" if together == 1 else f"steps {first} to {last}"
        try:
            self._write(events, steps, optimizers)
        except OSError as error:
            # Failing to write does not end the training.
            print(f"\ntfdp: no timeline was written: {error}.")
            return
        share = self.hidden_share
        hidden = f"; another thread computed in {share or 0:.0%} of the exchanges' time"
        hidden = "" if share is None else hidden
        update_ms = self.seconds["update of weights"] * 1e3
        print(
            f"\ntimeline of {steps}: {self.path}{hidden}; update of weights: "
            f"{update_ms:.1f} ms per step on all threads together. Open "
            "https://ui.perfetto.dev and drop the file there."
        )

    def on_train_end(self, logs: Any = None) -> None:
        """Reports that the step never came."""
        if self.traced_steps is None:
            last = self._steps_before
            instead = f"StepTimeline(step={last})" if last >= 2 else "more steps"
            if last > 2 and self._steps_together > 1:
                instead = "more steps, or a smaller steps_per_execution"
            print(
                f"\ntfdp: no timeline was written: the training ended after {last} "
                f"steps, and StepTimeline(step={self.step}) waits for step "
                f"{self.step}, outside of the first execution. Use {instead}."
            )

    def _started_trace(self) -> StepTrace | None:
        trace = StepTrace()
        try:
            trace.start()
        except tf.errors.AlreadyExistsError:
            # Raising would end the training.
            print(
                "\ntfdp: no timeline was written: TensorFlow has one profiler, and "
                f"another user of it is active in step {self.step} (a second "
                "StepTimeline, keras.callbacks.TensorBoard(profile_batch=...) or "
                "tf.profiler). Give each another step, by StepTimeline(step=...), or "
                "leave one of them out."
            )
            return None
        return trace

    def _write(self, events: Any, steps: str, optimizers: list[str]) -> None:
        """Writes the trace atomically."""
        strategy = self.model.distribute_strategy
        cluster = getattr(strategy, "cluster", None)
        host, hosts = (cluster.rank, cluster.workers) if cluster is not None else (0, 1)
        if host:
            name = self.path.name.removesuffix(traces.ENDING)
            self.path = self.path.with_name(f"{name}.host{host}{traces.ENDING}")
        local = 1 if strategy is None else strategy.num_replicas_in_sync // hosts
        trace = traces.chrome_trace(
            events,
            optimizers,
            steps=steps,
            host=host,
            hosts=hosts,
            first_rank=host * local,
        )
        with replaced(self.path) as half_written:
            half_written.write_text(trace, encoding="utf-8")

    def _steps_of_execution(self, batch: int) -> int:
        """Steps of this execution; an epoch's last one may have fewer."""
        together = self.model.steps_per_execution
        steps = (self.params or {}).get("steps")
        return together if steps is None else max(1, min(together, steps - batch))
