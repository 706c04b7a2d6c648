"""Makes AutoGraph treat tfdp's functions as library code, like TensorFlow's and Keras'.

Else it converts them and their callees: a custom loop's first step took five times as
long.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.autograph.core import config
from tensorflow.python.autograph.core.ag_ctx import ControlStatusCtx, Status
from tensorflow.python.eager.polymorphic_function.tf_method_target import TfMethodTarget
from tensorflow.python.util.tf_decorator import unwrap

from tfdp._private.names import autograph_artifact

Function = TypeVar("Function", bound=Callable)

# The first matching rule applies.
config.CONVERSION_RULES = (config.DoNotConvert("tfdp"), *config.CONVERSION_RULES)


def library_code(function: Function) -> Function:
    """Marks a function that AutoGraph calls as it is, but not its function arguments.

    For functions that `functools.wraps` makes look like the user's; others match by
    module. `tf.autograph.experimental.do_not_convert` would also leave the user's
    functions unconverted, so an `if` on a tensor in them would fail.
    """
    return autograph_artifact(function)


def as_the_caller_is(function: Function) -> Function:
    """`function`, converted by AutoGraph if AutoGraph converts the caller.

    TensorFlow converts what `strategy.run` is given, but not through library code.
    """
    status = tf.__internal__.autograph.control_status_ctx()
    if status.status.name != "ENABLED":
        return function
    convert = tf.__internal__.autograph.tf_convert
    return convert(function, status, convert_by_default=False)


def is_function(fn: Any) -> bool:
    """Whether `fn` is a `tf.function`."""
    return isinstance(fn, tf.types.experimental.PolymorphicFunction)


@contextlib.contextmanager
def in_functions() -> Iterator[None]:
    """Lets a `tf.function` build a graph, within the context, in any case.

    With `tf.config.run_functions_eagerly(True)` the replicas would run one after the
    other, and the first would wait for the others.
    """
    if not tf.config.functions_run_eagerly():
        yield
        return
    tf.config.run_functions_eagerly(False)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(True)


def python_function_of(fn: Any) -> Any:
    """The Python function of a `tf.function`, bound if it is a method; else `fn`."""
    if not is_function(fn):
        return fn
    function = fn.python_function
    method = unwrap(function)[1]
    bound_to = getattr(method, "__self__", None)
    if isinstance(bound_to, TfMethodTarget):
        return types.MethodType(method.__func__, bound_to.target)
    return function


def as_replicas_run_it(fn: Any) -> Callable:
    """`fn`; for a `tf.function` its Python function, AutoGraph-converted if requested.

    A `tf.function` is traced once for one device, so each replica runs the Python
    function. With `jit_compile=True` each replica calls it as it is.
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


def compiled_by_xla(function: Callable) -> Callable:
    """A function whose operations XLA makes one: fewer passes over memory."""
    compiled: Callable = tf.function(function, jit_compile=True, autograph=False)
    return compiled


def traced_as(fn: Any, wrapper: Callable) -> Callable:
    """`wrapper`, marked so that TensorFlow counts its retraces as those of `fn`.

    It counts by the wrapped function; several functions would share a wrapper's count.
    """
    noted: Any = wrapper
    noted.__signature__ = inspect.signature(wrapper)
    noted.__wrapped__ = fn.python_function  # unbound
    return wrapper
