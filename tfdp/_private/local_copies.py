"""A variable of one replica that stands for a component of a mirrored variable."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from tfdp._private.names import ResourceVariable

__all__ = ["local_copy_of"]


def local_copy_of(component: tf.Variable, whole: Any) -> tf.Variable:
    """A plain variable on the component's device that starts with its value."""
    with tf.init_scope(), tf.device(component.device):
        copy = ResourceVariable(
            component.read_value(),
            trainable=component.trainable,
            name=f"{component.name.split(':')[0]}/local",
        )
    # Keras and tapes find by it which variable of theirs a component belongs to.
    copy.handle._distributed_container = weakref.ref(whole)
    return copy
