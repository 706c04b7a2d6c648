"""`AdaScale`: a small batch's learning rate, scaled by what a large one is worth."""

from __future__ import annotations

import math
from typing import Any

import keras

from tfdp.callbacks.gradient_noise_scale import GradientNoiseScale
from tfdp.callbacks.other_callbacks import refuse_others
from tfdp.checks import is_number
from tfdp.errors import ConfigurationError
from tfdp.plan.noise_scale import ada_scale_gain
from tfdp.plan.schedule_formulas import check_rate
from tfdp.step.observers import NormsOfStep

SET_RATES = (
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
)


class AdaScale(GradientNoiseScale):
    """Runs a schedule that was made for a batch S times smaller, faster by the gain r.

    With the gradient G of all data, the covariance T of the gradients of b = B / S rows
    together, B the rows of a batch, and the schedule lr of a training in batches of b:

        r = (tr(T) + |G|^2) / (tr(T) / S + |G|^2)        from 1 to S
        learning rate of a step:  r lr(floor(p))         then p <- p + r

    Where noise is all there is a batch of S b rows is worth S steps, and where there is
    none it is worth one. p is the progress, in steps of the small batch: end training
    when it is what that training took (`total_steps`).

    Adds `ada_scale_gain` and `ada_scale_progress` to the logs of batches and epochs,
    beside `gradient_noise_scale`, from whose estimates it has the gain.

    Args:
      schedule: lr: a number of at least 0, or a Keras `LearningRateSchedule`.
      scale: S, above 1; not whole where batches are not. None: the number of replicas,
        for a schedule that one of them would train with on its rows alone.
      total_steps: of the small batch, above 0: training ends when p has come there.
        None: when `fit` ends it.
      initial_progress: p at the start, at least 0: that of a training that goes on.
      decay: see `GradientNoiseScale`; the paper's is 1 - S / 1000.

    Raises:
      ConfigurationError: when an argument is not as above; when training starts: as
        `GradientNoiseScale`, where the optimizer has a schedule of its own, and beside
        other callbacks that set the learning rate.

    Cost: as `GradientNoiseScale`, and an assignment to the learning rate per batch.
    With `steps_per_execution` above 1 so many steps have the same gain.

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
    Distributed Training", algorithm 1. Differs from the paper: the gain of a step is
    from the steps before it, and 1 in the first three; the estimates are those of
    `tfdp.plan.noise_scale`, whose replicas may have unequal parts, so that S need not
    be their number. `tfdp.callbacks.Checkpoint` keeps `progress` and the estimates; for
    checkpoints of your own keep `progress`, and pass it as `initial_progress`.
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
                "AdaScale.scale must be a number above 1, how many of the schedule's "
                f"batches make one, or None. Received: {scale!r}."
            )
        if total_steps is not None:
            check_rate("AdaScale.total_steps", total_steps, above_zero=True)
        self.schedule, self.scale, self.total_steps = schedule, scale, total_steps
        #: In steps of the schedule's batch.
        self.progress = check_rate("AdaScale.initial_progress", initial_progress)
        #: Of the next step.
        self.gain = 1.0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to look at gradients, and sets the learning rate.

        Raises:
          ConfigurationError: where it cannot.
        """
        super().on_train_begin(logs)
        # Not what `learning_rate` gives, which is a number of a schedule as well.
        inner = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        rate = inner.get_config().get("learning_rate")
        if not is_number(rate):
            raise ConfigurationError(
                f"AdaScale sets the learning rate in every step, and {inner.name!r} "
                f"has a schedule of its own ({rate!r}). Give that to AdaScale, and the "
                "optimizer a number."
            )
        refuse_others(
            self,
            (*SET_RATES, AdaScale),
            "set the learning rate (AdaScale takes a schedule)",
        )
        self._set_rate()

    def state_to_keep(self) -> dict[str, Any]:
        """What a checkpoint of the training keeps: the progress, too."""
        return super().state_to_keep() | {"progress": self.progress, "gain": self.gain}

    def take_back(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        super().take_back(state)
        self.progress, self.gain = state["progress"], state["gain"]
        self._set_rate()

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Goes on by what the steps that have run were worth."""
        super().on_train_batch_end(batch, logs)
        estimate = self._average.estimate()
        if estimate is not None:
            scale = self.scale or self.model.distribute_strategy.num_replicas_in_sync
            rows = self._rows / self._steps
            self.gain = ada_scale_gain(
                estimate.squared_norm, estimate.trace, rows / scale, scale
            )
        self._set_rate()
        self._tell(logs)
        if self.total_steps is not None and self.progress >= self.total_steps:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the estimate, the gain and the progress to the logs."""
        super().on_epoch_end(epoch, logs)
        self._tell(logs)

    def _tell(self, logs: dict[str, Any] | None) -> None:
        if logs is not None:
            logs["ada_scale_gain"] = self.gain
            logs["ada_scale_progress"] = self.progress

    def take_in(self, norms: NormsOfStep) -> None:
        """Learns from one step that has run, and goes on by what it was worth."""
        super().take_in(norms)
        # A step that a loss scaler left out has not moved the weights.
        if all(map(math.isfinite, norms)):
            self.progress += self.gain

    def _set_rate(self) -> None:
        rate = self.schedule
        if not isinstance(rate, float):
            rate = float(rate(math.floor(self.progress)))
        self.model.optimizer.learning_rate = self.gain * rate
