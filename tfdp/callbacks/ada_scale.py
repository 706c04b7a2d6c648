"""`AdaScale`: scales the learning rate by the gain of a larger batch."""

from __future__ import annotations

import math
from typing import Any

import keras

from tfdp.callbacks.gradient_noise_scale import GradientNoiseScale
from tfdp.callbacks.other_callbacks import Logs, refuse_others
from tfdp.checks import is_number
from tfdp.errors import ConfigurationError
from tfdp.plan.noise_scale import NormsOfStep, ada_scale_gain
from tfdp.plan.schedule_formulas import check_rate


class AdaScale(GradientNoiseScale):
    """Runs a schedule made for a batch S times smaller, faster by the gain r.

    With the gradient G of all data, the covariance T of gradients over b = B / S rows,
    B rows per batch, and the schedule lr for batches of b:

        r = (tr(T) + |G|^2) / (tr(T) / S + |G|^2)        from 1 to S
        learning rate of a step:  r lr(floor(p))         then p <- p + r

    If noise dominates, a batch is worth S steps; without noise, one. p is the progress
    in small-batch steps: end training at the `total_steps` that these take.

    Adds `ada_scale_gain` and `ada_scale_progress` to the logs of batches and epochs,
    and `gradient_noise_scale`; its estimates give the gain.

    Args:
      schedule: lr: a number of at least 0, or a Keras `LearningRateSchedule`.
      scale: S, above 1, possibly fractional. None: the number of replicas, for a
        schedule made for one replica's rows.
      total_steps: small-batch steps, above 0: training ends when p reaches it. None:
        with `fit`.
      initial_progress: p at the start, at least 0, to resume a training.
      decay: see `GradientNoiseScale`; the paper uses 1 - S / 1000.

    Raises:
      ConfigurationError: an argument is not as above; when training starts: as
        `GradientNoiseScale`; the optimizer has a schedule, or another callback sets the
        rate.

    Cost: as `GradientNoiseScale`, and one assignment per batch. All steps of an
    execution (`steps_per_execution`) have the same gain.

    ```python
    import keras
    import numpy as np
    import tfdp

    tfdp.use_virtual_devices(2)
    with tfdp.DataParallelStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(), "mse")
    generator = np.random.default_rng(0)
    x = generator.normal(size=(640, 4)).astype("float32")
    y = x[:, :1] + generator.normal(size=(640, 1))
    scaled = tfdp.callbacks.AdaScale(0.02)  # the rate for 16 rows
    model.fit(x, y, batch_size=32, epochs=2, verbose=0, callbacks=[scaled])
    print(scaled.gain, scaled.progress)  # 40 steps were worth more than 40
    ```

    Source: Johnson et al. 2020, "AdaScale SGD: A User-Friendly Algorithm for
    Distributed Training", algorithm 1. Differs from the paper: the gain of a step comes
    from the steps before it, and is 1 in the first three; the estimates are those of
    `tfdp.plan.noise_scale`, for unequal parts, so S need not be the number of replicas.
    `tfdp.callbacks.Checkpoint` stores `progress` and the estimates; for your own
    checkpoints store `progress` and pass it as `initial_progress`.
    """

    def __init__(
        self,
        schedule: Any,
        *,
        scale: float | None = None,
        total_steps: float | None = None,
        initial_progress: float = 0.0,
        decay: float = 0.99,
    ):
        super().__init__(decay)
        if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            schedule = check_rate("AdaScale.schedule", schedule)
        if scale is not None and (not is_number(scale) or not scale > 1):
            raise ConfigurationError(
                "AdaScale.scale must be a number above 1, the batch size over the "
                f"schedule's, or None. Received: {scale!r}."
            )
        if total_steps is not None:
            check_rate("AdaScale.total_steps", total_steps, above_zero=True)
        self.schedule, self.scale, self.total_steps = schedule, scale, total_steps
        #: In steps of the small batch.
        self.progress = check_rate("AdaScale.initial_progress", initial_progress)
        #: Of the next step.
        self.gain = 1.0

    def on_train_begin(self, logs: Logs = None) -> None:
        super().on_train_begin(logs)
        # Not `learning_rate`, which is a number for a schedule, too.
        inner = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        rate = inner.get_config().get("learning_rate")
        if not is_number(rate):
            raise ConfigurationError(
                f"AdaScale sets the learning rate in every step, but {inner.name!r} "
                f"has a schedule ({rate!r}). Give the schedule to AdaScale, and the "
                "optimizer a number."
            )
        schedulers = (
            keras.callbacks.LearningRateScheduler,
            keras.callbacks.ReduceLROnPlateau,
        )
        what = "set the learning rate (AdaScale takes a schedule)"
        refuse_others(self, (*schedulers, AdaScale), what)
        self._set_rate()

    def state_to_keep(self) -> dict[str, Any]:
        return super().state_to_keep() | {"progress": self.progress, "gain": self.gain}

    def take_back(self, state: dict[str, Any]) -> None:
        super().take_back(state)
        self.progress, self.gain = state["progress"], state["gain"]
        self._set_rate()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        super().on_train_batch_end(batch, logs)
        estimate = self._average.estimate()
        if estimate is not None:
            scale = self.scale or self.model.distribute_strategy.num_replicas_in_sync
            rows = self._rows / self._steps
            self.gain = ada_scale_gain(
                estimate.squared_norm, estimate.trace, rows / scale, scale
            )
        self._set_rate()
        self._add_to_logs(logs)
        if self.total_steps is not None and self.progress >= self.total_steps:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        self._add_to_logs(logs)

    def _add_to_logs(self, logs: Logs) -> None:
        if logs is not None:
            logs["ada_scale_gain"] = self.gain
            logs["ada_scale_progress"] = self.progress

    def add_step(self, norms: NormsOfStep) -> None:
        super().add_step(norms)
        # A step that a loss scaler skipped has not changed the weights.
        if all(map(math.isfinite, norms)):
            self.progress += self.gain

    def _set_rate(self) -> None:
        rate = self.schedule
        if not isinstance(rate, float):
            rate = float(rate(math.floor(self.progress)))
        self.model.optimizer.learning_rate = self.gain * rate
