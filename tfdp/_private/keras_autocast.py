"""In which type a layer computes with a variable, as Keras' dtype policies have it."""

from __future__ import annotations

import sys
from types import FrameType

import keras
import tensorflow as tf

from tfdp._private.names import get_autocast_scope

__all__ = ["autocast_dtype", "is_made_for_autocast"]

# Keras makes its TensorFlow variable a few calls above the creator of the strategy.
MOST_FRAMES = 40


def autocast_dtype() -> tf.DType | None:
    """The float type that the layer being called computes in; None: outside of one."""
    scope = get_autocast_scope()
    dtype = getattr(scope, "dtype", None)
    return None if dtype is None else tf.as_dtype(dtype)


def is_made_for_autocast() -> bool:
    """Whether the variable that is being made belongs to a Keras variable that casts.

    `layer.add_weight(autocast=False)` makes one that does not.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MOST_FRAMES):
        if frame is None:
            return False
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "_initialize" and isinstance(owner, keras.Variable):
            return bool(owner._autocast)
        frame = frame.f_back
    return False
