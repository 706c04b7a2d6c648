"""Checks of the numbers and words that the optimizers are made with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras

from tfdp.checks import is_number
from tfdp.errors import ConfigurationError

__all__ = ["check_choice", "check_learning_rate", "check_number"]


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """`value`, refused unless it is one of `choices`."""
    if value not in choices:
        raise ConfigurationError(
            f"{name} must be one of {', '.join(map(repr, choices))}. "
            f"Received: {value!r}."
        )
    return value


def check_number(
    name: str, value: Any, *, below: float = math.inf, above_zero: bool = False
) -> float:
    """`value` as a float, refused unless 0 <= value < below (0 < value < below)."""
    if (
        not is_number(value)
        or not 0 <= float(value) < below
        or (above_zero and value == 0)
    ):
        allowed = "above 0" if above_zero else "of at least 0"
        limit = "" if below == math.inf else f" and below {below:g}"
        raise ConfigurationError(
            f"{name} must be a finite number {allowed}{limit}. Received: {value!r}."
        )
    return float(value)


def check_learning_rate(name: str, value: Any) -> Any:
    """A number as a float; a schedule or function as it came; anything else refused."""
    if callable(value) or isinstance(
        value, keras.optimizers.schedules.LearningRateSchedule
    ):
        return value
    return check_number(name, value)
