"""In which type a layer computes with a variable, as Keras' dtype policies have it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.names import get_autocast_scope, keras_state

__all__ = ["autocast_dtype", "autocast_scope", "autocasting_as", "stored_value"]

# What Keras calls it.
ATTRIBUTE = "autocast_scope"


def autocast_dtype() -> tf.DType | None:
    """The float type that the layer being called computes in; None: outside of one."""
    scope = get_autocast_scope()
    dtype = getattr(scope, "dtype", None)
    return None if dtype is None else tf.as_dtype(dtype)


def autocast_scope() -> Any:
    """How the layer being called reads variables, for `autocasting_as`."""
    return get_autocast_scope()


@contextlib.contextmanager
def autocasting_as(scope: Any) -> Iterator[None]:
    """While this lasts variables are read as where `autocast_scope` gave `scope`."""
    outside = get_autocast_scope()
    # Not a new scope without a type where there was none: in one Keras takes all
    # variables to be of its default type.
    keras_state.set_global_attribute(ATTRIBUTE, scope)
    try:
        yield
    finally:
        keras_state.set_global_attribute(ATTRIBUTE, outside)


def stored_value(variable: keras.Variable) -> Any:
    """What a variable holds, and not that in the type of the layer being called."""
    with autocasting_as(None):
        return variable.value
