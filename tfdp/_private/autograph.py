"""tfdp's functions are library code to AutoGraph, as TensorFlow's and Keras' own are.

It would convert each of them that a program's step calls, and all that they call: the
first step of a loop of one's own took five times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf
from tensorflow.python.autograph.core import config

from tfdp._private.names import autograph_artifact

__all__ = ["as_the_caller_is", "library_code"]

Function = TypeVar("Function", bound=Callable)

# The first rule that fits says.
config.CONVERSION_RULES = (config.DoNotConvert("tfdp"), *config.CONVERSION_RULES)


def library_code(function: Function) -> Function:
    """A function that AutoGraph calls as it is, and which it still looks through.

    For those that pass for a program's, by `functools.wraps`; others are known by their
    module.

    `tf.autograph.experimental.do_not_convert` would also leave the user's functions
    as they are that this one is given, and an `if` on a tensor in them would fail.
    """
    return autograph_artifact(function)


def as_the_caller_is(function: Function) -> Function:
    """`function`, converted by AutoGraph if that converts who calls this.

    TensorFlow converts what `strategy.run` is given, and does not see it where it is
    given library code that calls it.
    """
    status = tf.__internal__.autograph.control_status_ctx()
    if status.status.name != "ENABLED":
        return function
    return tf.__internal__.autograph.tf_convert(
        function, status, convert_by_default=False
    )
