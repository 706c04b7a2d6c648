"""Learning-rate formulas on plain numbers: no TensorFlow, no state.

`tfdp.schedules` wraps them as Keras schedules. The two functions that only add,
multiply and divide (`interpolate`, `remaining_fraction`) take tensors as well, so the
schedules and the planner compute from the same lines.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

from tfdp.checks import is_number
from tfdp.errors import ConfigurationError

SCALING_RULES = ("linear", "sqrt")


def check_rate(name: str, value: Any, *, above_zero: bool = False) -> float:
    """`value` as a float, refused unless a finite number of at least (above) 0."""
    allowed = "above 0" if above_zero else "of at least 0"
    if (
        not is_number(value)
        or not math.isfinite(value)
        or value < 0
        or (above_zero and value == 0)
    ):
        raise ConfigurationError(
            f"{name} must be a finite number {allowed}. Received: {value!r}."
        )
    return float(value)


def check_steps(name: str, value: Any, *, minimum: int = 0) -> int:
    """`value` as an int, refused unless a whole number of at least `minimum`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, numbers.Integral)
        or value < minimum
    ):
        raise ConfigurationError(
            f"{name} must be a whole number of at least {minimum}. Received: {value!r}."
        )
    return int(value)


def interpolate(start: Any, end: Any, fraction: Any) -> Any:
    """`start * (1 - fraction) + end * fraction`: exactly `start` at 0, `end` at 1.

    The shorter `start + (end - start) * fraction` may miss `end` by one rounding.

    >>> interpolate(0.0, 3.0, 0.5)
    1.5
    """
    return start * (1.0 - fraction) + end * fraction


def remaining_fraction(step: Any, warmup_steps: int, total_steps: int) -> Any:
    """The part of the decay that is still to come: `(T + 1 - step) / (T + 1 - W)`.

    It is 1 at step `W = warmup_steps` and 0 at step `T + 1 = total_steps + 1`. Written
    with whole numbers above the bar so that it stays exact in float32 near the end.

    >>> remaining_fraction(4, 4, 11), remaining_fraction(12, 4, 11)
    (1.0, 0.0)
    """
    return (total_steps + 1 - step) / (total_steps + 1 - warmup_steps)


def linear_warmup(
    step: float,
    after: float | Callable[[float], float],
    warmup_steps: int,
    initial: float = 0.0,
) -> float:
    """The rate of `tfdp.schedules.LinearWarmup` at `step`, as a plain number.

    Args:
      step: index of the step, the first is 0.
      after: a rate, or a function of the absolute step that gives one.
      warmup_steps: length of the warm-up in steps, 0 for none.
      initial: the rate at step 0.

    Returns:
      `initial + (after(W) - initial) * step / W` for `step < W = warmup_steps`, and
      `after(step)` from `W` on.

    >>> [linear_warmup(step, 0.4, warmup_steps=4) for step in (0, 1, 4, 9)]
    [0.0, 0.1, 0.4, 0.4]
    """

    def after_at(at_step: float) -> float:
        return after(at_step) if callable(after) else after

    if step >= warmup_steps:
        return after_at(step)
    return interpolate(initial, after_at(warmup_steps), step / warmup_steps)


def polynomial_decay(
    step: float,
    peak_learning_rate: float,
    total_steps: int,
    warmup_steps: int = 0,
    end_learning_rate: float = 1e-4,
    power: float = 2.0,
) -> float:
    """The rate of `tfdp.schedules.PolynomialDecay` at `step`, as a plain number.

    With W = warmup_steps, T = total_steps, D = T - W + 1, p = peak_learning_rate and
    e = end_learning_rate:

        step <= W:      p * step / W
        step <= T + 1:  (p - e) * (1 - (step - W) / D) ** power + e
        later:          e

    >>> polynomial_decay(2, 10.0, total_steps=11, warmup_steps=4)
    5.0
    >>> polynomial_decay(4, 10.0, total_steps=11, warmup_steps=4)
    10.0
    >>> polynomial_decay(8, 10.0, total_steps=11, warmup_steps=4, end_learning_rate=2.0)
    4.0
    """
    if step <= warmup_steps and warmup_steps > 0:
        return interpolate(0.0, peak_learning_rate, step / warmup_steps)
    remaining = remaining_fraction(
        min(step, total_steps + 1), warmup_steps, total_steps
    )
    return interpolate(end_learning_rate, peak_learning_rate, remaining**power)


def scale_learning_rate(
    base_lr: float, base_batch: int, global_batch: int, rule: str = "linear"
) -> float:
    """The learning rate for another batch size.

        linear:  base_lr * global_batch / base_batch
        sqrt:    base_lr * sqrt(global_batch / base_batch)

    Args:
      base_lr: the rate that was tuned at `base_batch`, at least 0.
      base_batch: samples per step for which `base_lr` was tuned, at least 1.
      global_batch: samples per step of all replicas together, at least 1; with
        gradient accumulation, of all micro-batches together.
      rule: `"linear"` for SGD with momentum, `"sqrt"` for Adam and LAMB.

    Returns:
      The scaled rate.

    Raises:
      ConfigurationError: when a number or the rule is not one of the above.

    >>> scale_learning_rate(0.1, base_batch=256, global_batch=8192)
    3.2
    >>> scale_learning_rate(0.001, base_batch=256, global_batch=1024, rule="sqrt")
    0.002

    Source: linear: P. Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet
    in 1 Hour", 2017, arXiv 1706.02677, section 2.1. sqrt: A. Krizhevsky, "One weird
    trick for parallelizing convolutional neural networks", 2014, arXiv 1404.5997;
    used with LAMB by Y. You et al., 2020, arXiv 1904.00962.
    """
    rate = check_rate("base_lr", base_lr)
    base = check_steps("base_batch", base_batch, minimum=1)
    batch = check_steps("global_batch", global_batch, minimum=1)
    if rule not in SCALING_RULES:
        raise ConfigurationError(
            f"rule must be one of {', '.join(SCALING_RULES)}. Received: {rule!r}."
        )
    ratio = batch / base
    return rate * (ratio if rule == "linear" else math.sqrt(ratio))
