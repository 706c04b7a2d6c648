"""What Keras knows while it calls layers: whether it trains, and what a caller said.

A layer that is not told whether it trains asks for it here. Keras keeps one context for
each thread and each call from outside; layers within write into it as they are called.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.names import get_autocast_scope, keras_state

__all__ = [
    "autocast_dtype",
    "autocasting_as",
    "call_context",
    "calling_as",
    "get_autocast_scope",
    "keras_attribute",
    "stored_value",
]


# What Keras calls it.
CALL_CONTEXT = "current_call_ctx"


def call_context() -> Any:
    """The context as it is now, for `calling_as`; None: no layer is being called."""
    return copy.copy(keras_state.get_global_attribute(CALL_CONTEXT))


def calling_as(context: Any) -> contextlib.AbstractContextManager[None]:
    """While this lasts layers are called as where `call_context` gave `context`."""
    return keras_attribute(CALL_CONTEXT, copy.copy(context))


# What Keras keeps for each thread under names of its own.


@contextlib.contextmanager
def keras_attribute(name: str, value: Any) -> Iterator[None]:
    """While this lasts Keras finds `value` under `name` in this thread."""
    outside = keras_state.get_global_attribute(name)
    keras_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        keras_state.set_global_attribute(name, outside)


# In which type a layer computes with a variable, as Keras' dtype policies have it.


# What Keras calls it.
AUTOCAST_SCOPE = "autocast_scope"


def autocast_dtype() -> tf.DType | None:
    """The float type that the layer being called computes in; None: outside of one."""
    scope = get_autocast_scope()
    dtype = getattr(scope, "dtype", None)
    return None if dtype is None else tf.as_dtype(dtype)


def autocasting_as(scope: Any) -> contextlib.AbstractContextManager[None]:
    """While this lasts variables are read as where `get_autocast_scope` gave `scope`.

    Not in a new scope without a type where there was none: in one Keras takes all
    variables to be of its default type.
    """
    return keras_attribute(AUTOCAST_SCOPE, scope)


def stored_value(variable: keras.Variable) -> Any:
    """What a variable holds, and not that in the type of the layer being called."""
    with autocasting_as(None):
        return variable.value
