"""A tensor, or zeros in its place: a large one is not copied where it is kept."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp._private.names import in_compiled_function

__all__ = ["kept_if"]

# A branch takes milliseconds while a step is traced; what it saves of each step is to
# read and write the tensor. (TensorFlow's Switch and Merge, built by hand, would take
# neither, and a step with them never ends.)
LEAST_BRANCH_BYTES = 1 << 20


def kept_if(condition: Any, value: tf.Tensor) -> tf.Tensor:
    """`value` where `condition` holds; else zeros, whatever `value` is made of.

    Args:
      condition: a scalar boolean tensor.
      value: of any shape and number type.
    """
    if tf.executing_eagerly():
        return value if condition else tf.zeros_like(value)
    size_bytes = (value.shape.num_elements() or 0) * value.dtype.size
    if size_bytes < LEAST_BRANCH_BYTES or in_compiled_function():
        return tf.where(condition, value, tf.zeros_like(value))
    return tf.cond(condition, lambda: value, lambda: tf.zeros_like(value))
