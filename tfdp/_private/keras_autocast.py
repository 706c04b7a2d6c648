"""In which type a layer computes with a variable, as Keras' dtype policies have it."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.variables import AutocastScope

from tfdp._private.names import get_autocast_scope

__all__ = ["autocast_dtype", "computing_in", "stored_value"]


def autocast_dtype() -> tf.DType | None:
    """The float type that the layer being called computes in; None: outside of one."""
    scope = get_autocast_scope()
    dtype = getattr(scope, "dtype", None)
    return None if dtype is None else tf.as_dtype(dtype)


def computing_in(dtype: tf.DType | None) -> contextlib.AbstractContextManager:
    """While this lasts variables are read as in a layer that computes in `dtype`.

    Args:
      dtype: None: as they are stored.
    """
    scope: contextlib.AbstractContextManager = AutocastScope(
        None if dtype is None else dtype.name
    )
    return scope


def stored_value(variable: keras.Variable) -> Any:
    """What a variable holds, and not that in the type of the layer being called."""
    with computing_in(None):
        return variable.value
