"""Learning-rate formulas: no TensorFlow, no state; for `tfdp.schedules`."""

from __future__ import annotations

import math
import numbers
from typing import Any

from tfdp.checks import is_number
from tfdp.errors import ConfigurationError

SCALING_RULES = ("linear", "sqrt")


def check_rate(name: str, value: Any, *, above_zero: bool = False) -> float:
    """`value` as a float; must be finite, and at least (above) 0."""
    allowed = "above 0" if above_zero else "of at least 0"
    is_rate = is_number(value) and 0 <= value < math.inf
    if not is_rate or (above_zero and value == 0):
        raise ConfigurationError(
            f"{name} must be a finite number {allowed}. Received: {value!r}."
        )
    return float(value)


def check_steps(name: str, value: Any, *, minimum: int = 0) -> int:
    """`value` as an int; must be a whole number of at least `minimum`."""
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or value < minimum:
        raise ConfigurationError(
            f"{name} must be a whole number of at least {minimum}. Received: {value!r}."
        )
    return int(value)


def interpolate(start: Any, end: Any, fraction: Any) -> Any:
    """`start * (1 - fraction) + end * fraction`: exactly `start` at 0, `end` at 1.

    The shorter `start + (end - start) * fraction` may miss `end` by one rounding error.

    >>> interpolate(0.0, 3.0, 0.5)
    1.5
    """
    return start * (1.0 - fraction) + end * fraction


def remaining_fraction(step: Any, warmup_steps: int, total_steps: int) -> Any:
    """The remaining part of the decay: `(T + 1 - step) / (T + 1 - W)`.

    It is 1 at step `W = warmup_steps` and 0 at step `T + 1 = total_steps + 1`. Integers
    in the numerator keep it exact in float32 near the end.

    >>> remaining_fraction(4, 4, 11), remaining_fraction(12, 4, 11)
    (1.0, 0.0)
    """
    return (total_steps + 1 - step) / (total_steps + 1 - warmup_steps)


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
