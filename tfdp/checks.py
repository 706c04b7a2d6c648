"""What an argument, a file or a message holds: whole numbers, numbers. Pure."""

from __future__ import annotations

import argparse
import math
import numbers
from collections.abc import Callable
from typing import TypeGuard


def is_whole(
    value: object, least: float = -math.inf, most: float = math.inf
) -> TypeGuard[int]:
    """Whether it is a Python int, and no bool, from `least` to `most`.

    >>> is_whole(2, least=1), is_whole(True), is_whole(2.0), is_whole(0, least=1)
    (True, False, False, False)
    """
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return is_integer and least <= value <= most  # type: ignore[operator]


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real number, NumPy's too, finite or not, and no bool.

    >>> is_number(1), is_number(1.5), is_number(True), is_number("1")
    (True, True, False, False)
    """
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def integer_from(least: int) -> Callable[[str], int]:
    """A `type` for argparse: integers of at least `least`.

    >>> integer_from(1)("2")
    2
    """

    def integer(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(
                f"needs an integer of at least {least}, not {text}"
            )
        return number

    return integer
