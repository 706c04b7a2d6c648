"""tfdp's functions are library code to AutoGraph, as TensorFlow's own are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tfdp._private.names import autograph_artifact

__all__ = ["library_code"]

Function = TypeVar("Function", bound=Callable)


def library_code(function: Function) -> Function:
    """A function that AutoGraph calls as it is, and which it still looks through.

    `tf.autograph.experimental.do_not_convert` would also leave the user's functions
    as they are that this one is given, and an `if` on a tensor in them would fail.
    """
    return autograph_artifact(function)
