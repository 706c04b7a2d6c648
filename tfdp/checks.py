"""Type checks of arguments, file contents and messages. Pure."""

from __future__ import annotations

import argparse
import difflib
import math
import numbers
from collections.abc import Callable, Iterable
from typing import TypeGuard

from tfdp.errors import ConfigurationError


def is_whole(
    value: object, least: float = -math.inf, most: float = math.inf
) -> TypeGuard[int]:
    """Whether `value` is a Python int (no bool) from `least` to `most`.

    >>> is_whole(2, least=1), is_whole(True), is_whole(2.0), is_whole(0, least=1)
    (True, False, False, False)
    """
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return is_integer and least <= value <= most  # type: ignore[operator]


def check_whole(
    name: str,
    value: object,
    least: float = -math.inf,
    most: float = math.inf,
    why: str = "",
) -> None:
    """Raises a ConfigurationError unless `value` is an int from `least` to `most`."""
    if not is_whole(value, least, most):
        limits = (
            f"from {least} to {most}" if most < math.inf else f"of at least {least}"
        )
        raise ConfigurationError(
            f"{name} must be an integer {limits}{why}. Received: {value!r}."
        )


def check_one_of(name: str, value: object, allowed: Iterable[str]) -> None:
    """Raises a ConfigurationError unless `value` is one of the texts `allowed`."""
    texts = list(allowed)
    if value not in texts:
        listed = ", ".join(map(repr, texts))
        raise ConfigurationError(
            f"{name} must be one of {listed}. Received: {value!r}."
            f"{did_you_mean(value, texts)}"
        )


def did_you_mean(given: object, names: Iterable[str]) -> str:
    """The end of an error about a name that does not exist; begins with a space.

    >>> did_you_mean("optimiser", ["none", "optimizer"]), did_you_mean("x", ["none"])
    (' Did you mean optimizer?', '')
    """
    close = nearest(str(given), names)
    return "" if close is None else f" Did you mean {close}?"


def nearest(given: str, names: Iterable[str]) -> str | None:
    """The name that `given` most likely misspells; None if none is near."""
    return next(iter(difflib.get_close_matches(given, list(names), n=1)), None)


def what_it_is(given: object) -> str:
    """`given` in an error about an object; of a class, how to make one.

    >>> what_it_is(dict), what_it_is("sgd")
    ('the class dict; call it: dict()', "'sgd'")
    """
    if isinstance(given, type):
        return f"the class {given.__name__}; call it: {given.__name__}()"
    return repr(given)


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a real number (NumPy's too; no bool), finite or not.

    >>> is_number(1), is_number(1.5), is_number(True), is_number("1")
    (True, True, False, False)
    """
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def integer_from(least: int, most: float = math.inf) -> Callable[[str], int]:
    """A `type` for argparse: integers of at least `least`, and at most `most`."""
    bound = f" of at least {least}" if most == math.inf else f", {least} to {most}"

    def integer(text: str) -> int:
        number = int(text)
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"needs an integer{bound}, not {text}")
        return number

    return integer
