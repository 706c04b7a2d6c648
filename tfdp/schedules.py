"""Learning-rate schedules of large-batch training, as Keras schedules.

They are serializable and take the step as an int, a float, a tensor or a Keras
variable. They compute in float32, which holds every step below 2**24 exactly.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from tfdp.errors import ConfigurationError
from tfdp.plan.schedule_formulas import (
    check_rate,
    check_steps,
    interpolate,
    remaining_fraction,
    scale_learning_rate,
)

__all__ = ["LinearWarmup", "PolynomialDecay", "scale_learning_rate"]


def __dir__() -> list[str]:
    return [*__all__]


@keras.saving.register_keras_serializable("tfdp")
class LinearWarmup(keras.optimizers.schedules.LearningRateSchedule):
    """A linear warm-up from `initial` to any schedule, then that schedule.

    With W = warmup_steps:

        step < W:   initial + (after(W) - initial) * step / W
        step >= W:  after(step)

    `after` gets the absolute step, so the boundaries of a `PiecewiseConstantDecay` keep
    their meaning, and there is no jump at W.

    Args:
      after: a number of at least 0 (a constant rate), or any Keras
        `LearningRateSchedule`.
      warmup_steps: length of the warm-up in optimizer steps; 0 means none.
      initial: the rate at step 0, at least 0. Facebook's recipe starts at the rate of
        one worker, MLPerf's and BERT's at 0.

    Raises:
      ConfigurationError: for a bad argument.

    ```python
    import keras
    from tfdp.schedules import LinearWarmup

    steps_per_epoch = 156  # ImageNet with a global batch of 8192
    decay = keras.optimizers.schedules.PiecewiseConstantDecay(
        [30 * steps_per_epoch, 60 * steps_per_epoch], [3.2, 0.32, 0.032]
    )
    schedule = LinearWarmup(decay, warmup_steps=5 * steps_per_epoch, initial=0.1)
    print(float(schedule(0)), float(schedule(5 * steps_per_epoch)))
    ```

    Source: P. Goyal et al., 2017, arXiv 1706.02677, section 2.2 ("gradual warmup").
    Differs from BERT's `WarmUp` (Model Garden), which aims at after(0) and jumps at W.
    """

    def __init__(self, after: Any, warmup_steps: int, initial: float = 0.0) -> None:
        super().__init__()
        if not isinstance(after, keras.optimizers.schedules.LearningRateSchedule):
            if callable(after):
                raise ConfigurationError(
                    "LinearWarmup.after must be a number or a Keras "
                    "LearningRateSchedule (a plain function cannot be saved): "
                    f"subclass LearningRateSchedule. Received: {after!r}."
                )
            after = check_rate("LinearWarmup.after", after)
        self.after = after
        self.warmup_steps = check_steps("LinearWarmup.warmup_steps", warmup_steps)
        self.initial = check_rate("LinearWarmup.initial", initial)

    def _after_at(self, step: Any) -> Any:
        rate = self.after if isinstance(self.after, float) else self.after(step)
        return ops.cast(rate, "float32")

    def __call__(self, step: Any) -> Any:
        step = ops.convert_to_tensor(step)
        rate = self._after_at(step)
        if self.warmup_steps == 0:
            return rate
        # In the dtype of the step: schedules such as PiecewiseConstantDecay compare it
        # with their boundaries in that dtype.
        target = self._after_at(ops.cast(self.warmup_steps, step.dtype))
        fraction = ops.cast(step, "float32") / float(self.warmup_steps)
        warmup = interpolate(self.initial, target, fraction)
        return ops.where(step < ops.cast(self.warmup_steps, step.dtype), warmup, rate)

    def get_config(self) -> dict[str, Any]:
        after = self.after
        if not isinstance(after, float):
            after = keras.optimizers.schedules.serialize(after)
        return {
            "after": after,
            "warmup_steps": self.warmup_steps,
            "initial": self.initial,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LinearWarmup:
        after = config["after"]
        if isinstance(after, dict):
            after = keras.optimizers.schedules.deserialize(after)
        return cls(**{**config, "after": after})


@keras.saving.register_keras_serializable("tfdp")
class PolynomialDecay(keras.optimizers.schedules.LearningRateSchedule):
    """MLPerf's schedule for LARS: a warm-up from 0, then polynomial decay.

    With W = warmup_steps, T = total_steps, D = T - W + 1, p = peak_learning_rate and
    e = end_learning_rate:

        step <= W:      p * step / W
        step <= T + 1:  (p - e) * (1 - (step - W) / D) ** power + e
        later:          e

    The optimizer's first step is step 0: with a warm-up its rate is 0, as in the
    reference. T steps use the rates of step 0 to T - 1; the end rate is reached at T +
    1.

    Args:
      peak_learning_rate: the rate at the end of the warm-up, at least 0.
      total_steps: optimizer steps of the training, warm-up included, at least 1.
      warmup_steps: how many of them warm up, from 0 (the decay starts at step 0 with
        the peak rate) to below `total_steps`.
      end_learning_rate: the rate at the end of the decay, at least 0.
      power: above 0. 2 in MLPerf's LARS; 1 is linear, 0.5 NVIDIA's choice for LAMB.

    Raises:
      ConfigurationError: for an argument out of its range.

    ```python
    from tfdp.schedules import PolynomialDecay

    schedule = PolynomialDecay(31.2, total_steps=2_512, warmup_steps=1_000)
    print([float(schedule(step)) for step in (0, 500, 1_000, 2_513)])
    ```

    Source: MLCommons reference, image classification for TensorFlow 2,
    `PolynomialDecayWithWarmup`; the polynomial: Y. You et al., 2017, arXiv 1708.03888.
    `keras.optimizers.schedules.PolynomialDecay` has no warm-up; this one equals it at
    `step - W` with `decay_steps = D`.
    """

    def __init__(
        self,
        peak_learning_rate: float,
        total_steps: int,
        warmup_steps: int = 0,
        *,
        end_learning_rate: float = 1e-4,
        power: float = 2.0,
    ) -> None:
        super().__init__()
        self.peak_learning_rate = check_rate(
            "PolynomialDecay.peak_learning_rate", peak_learning_rate
        )
        self.total_steps = check_steps(
            "PolynomialDecay.total_steps", total_steps, minimum=1
        )
        self.warmup_steps = check_steps("PolynomialDecay.warmup_steps", warmup_steps)
        if self.warmup_steps >= self.total_steps:
            raise ConfigurationError(
                "PolynomialDecay.warmup_steps must be below total_steps="
                f"{self.total_steps}, which includes them. Received: {warmup_steps}."
            )
        self.end_learning_rate = check_rate(
            "PolynomialDecay.end_learning_rate", end_learning_rate
        )
        if self.end_learning_rate > self.peak_learning_rate:
            raise ConfigurationError(
                "PolynomialDecay.end_learning_rate must be at most "
                f"peak_learning_rate={self.peak_learning_rate}, or the rate would "
                f"rise. Received: {end_learning_rate}."
            )
        self.power = check_rate("PolynomialDecay.power", power, above_zero=True)

    def __call__(self, step: Any) -> Any:
        step = ops.cast(step, "float32")
        remaining = remaining_fraction(
            ops.minimum(step, float(self.total_steps + 1)),
            self.warmup_steps,
            self.total_steps,
        )
        decay = interpolate(
            self.end_learning_rate,
            self.peak_learning_rate,
            ops.power(remaining, self.power),
        )
        if self.warmup_steps == 0:
            return decay
        fraction = step / float(self.warmup_steps)
        warmup = interpolate(0.0, self.peak_learning_rate, fraction)
        return ops.where(step <= float(self.warmup_steps), warmup, decay)

    def get_config(self) -> dict[str, Any]:
        return {
            "peak_learning_rate": self.peak_learning_rate,
            "total_steps": self.total_steps,
            "warmup_steps": self.warmup_steps,
            "end_learning_rate": self.end_learning_rate,
            "power": self.power,
        }
