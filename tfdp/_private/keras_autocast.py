"""In which type a layer computes with a variable, as Keras' dtype policies have it."""

from __future__ import annotations

import tensorflow as tf

from tfdp._private.names import get_autocast_scope

__all__ = ["autocast_dtype"]


def autocast_dtype() -> tf.DType | None:
    """The float type that the layer being called computes in; None: outside of one."""
    scope = get_autocast_scope()
    dtype = getattr(scope, "dtype", None)
    return None if dtype is None else tf.as_dtype(dtype)
