"""Lists of tensors as one value of a graph, without a copy."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

__all__ = ["apart", "as_one"]


def as_one(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """One value that holds on to all of `tensors`; there are kernels for CPUs only."""
    return tf.raw_ops.CompositeTensorVariantFromComponents(
        components=list(tensors), metadata=""
    )


def apart(together: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors of `as_one`.

    Args:
      together: what it returned.
      like: tensors, or specs, of their types and shapes.
    """
    tensors = tf.raw_ops.CompositeTensorVariantToComponents(
        encoded=together, metadata="", Tcomponents=[tensor.dtype for tensor in like]
    )
    for tensor, other in zip(tensors, like, strict=True):
        tensor.set_shape(other.shape)
    return list(tensors)
