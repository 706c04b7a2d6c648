"""In which type a layer computes with a variable, as Keras' dtype policies have it."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_attributes import keras_attribute
from tfdp._private.names import get_autocast_scope

__all__ = ["autocast_dtype", "autocasting_as", "get_autocast_scope", "stored_value"]

# What Keras calls it.
ATTRIBUTE = "autocast_scope"


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
    return keras_attribute(ATTRIBUTE, scope)


def stored_value(variable: keras.Variable) -> Any:
    """What a variable holds, and not that in the type of the layer being called."""
    with autocasting_as(None):
        return variable.value
