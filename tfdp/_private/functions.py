"""tfdp's functions are library code to AutoGraph, as TensorFlow's and Keras' own are.

It would convert each of them that a program's step calls, and all that they call: the
first step of a loop of one's own took five times as long.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.autograph.core import config
from tensorflow.python.autograph.core.ag_ctx import ControlStatusCtx, Status
from tensorflow.python.eager.polymorphic_function.tf_method_target import TfMethodTarget
from tensorflow.python.util.tf_decorator import unwrap

from tfdp._private.names import autograph_artifact

__all__ = [
    "as_replicas_run_it",
    "as_the_caller_is",
    "is_function",
    "library_code",
    "python_function_of",
    "traced_as",
]


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


# The Python function in a `tf.function`, which runs on each replica in its place.
#
# A `tf.function` is traced once and called for one device. TensorFlow's strategies take
# one that `strategy.run` is given apart, too.


def is_function(fn: Any) -> bool:
    """Whether `fn` is a `tf.function`."""
    return isinstance(fn, tf.types.experimental.PolymorphicFunction)


def python_function_of(fn: Any) -> Any:
    """What `fn`, a `tf.function`, was made of; anything else as it is.

    Of a method that is decorated in its class it is the method of the object.
    """
    if not is_function(fn):
        return fn
    function = fn.python_function
    method = unwrap(function)[1]
    bound_to = getattr(method, "__self__", None)
    if isinstance(bound_to, TfMethodTarget):
        return types.MethodType(method.__func__, bound_to.target)
    return function


def as_replicas_run_it(fn: Any) -> Callable:
    """`fn`; of a `tf.function` what is in it, converted by AutoGraph as it asks.

    One that XLA compiles is called by each replica as it is.
    """
    if not is_function(fn):
        return fn
    if fn._jit_compile:

        def call_compiled(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        return call_compiled
    function = python_function_of(fn)
    if not fn._autograph:
        return tf.autograph.experimental.do_not_convert(function)
    status = ControlStatusCtx(status=Status.ENABLED)
    return tf.__internal__.autograph.tf_convert(function, status, user_requested=True)


def traced_as(fn: Any, wrapper: Callable) -> Callable:
    """`wrapper`, of which TensorFlow warns as of `fn`, a `tf.function`.

    It counts by what is wrapped how often a function is traced: by the wrapper, those
    of several functions would be counted together.
    """
    noted: Any = wrapper
    noted.__signature__ = inspect.signature(wrapper)
    noted.__wrapped__ = fn.python_function  # which holds no object that it is of
    return wrapper
