"""Numbers that a simulation is given, refused at the door when they mean nothing."""

from __future__ import annotations

import math

from tfdp.checks import is_number, is_whole
from tfdp.errors import ConfigurationError

__all__ = ["LEAST", "MOST", "at_least_zero", "positive", "share", "whole"]

#: Above this no quantity of a training lies, in seconds, bytes, FLOPs or devices.
MOST = 1e24
#: Below this none but 0 does: what is divided by it stays finite.
LEAST = 1e-24


def positive(owner: str, name: str, value: object) -> None:
    """Refuses what is no number from 1e-24 to 1e24.

    Raises:
      ConfigurationError: naming the field and what came.
    """
    if not _is_finite(value) or value < LEAST:  # type: ignore[operator]
        _refuse(owner, name, "a number above 0", value)


def at_least_zero(owner: str, name: str, value: object) -> None:
    """Refuses what is no finite number from 0 to 1e24."""
    if not _is_finite(value) or value < 0:  # type: ignore[operator]
        _refuse(owner, name, "a number of at least 0", value)


def share(owner: str, name: str, value: object) -> None:
    """Refuses what is no number from 0 to 1."""
    if not _is_finite(value) or not 0 <= value <= 1:  # type: ignore[operator]
        _refuse(owner, name, "a number from 0 to 1", value)


def whole(
    owner: str, name: str, value: object, least: int = 1, most: float = MOST
) -> None:
    """Refuses what is no whole number from `least` to `most`."""
    if not is_whole(value, least=least, most=most):
        upper = "" if most == MOST else f" and at most {most:,.0f}"
        _refuse(owner, name, f"a whole number of at least {least}{upper}", value)


def _is_finite(value: object) -> bool:
    # A whole number may be too large to be a float at all.
    return is_number(value) and abs(value) <= MOST and math.isfinite(value)


def _refuse(owner: str, name: str, allowed: str, value: object) -> None:
    text = repr(value)
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    is_bounded = "from" in allowed or "at most" in allowed
    limit = "" if is_bounded else f" (at most {MOST:g})"
    raise ConfigurationError(
        f"{owner}: {name} must be {allowed}{limit}. Received: {shown}."
    )
