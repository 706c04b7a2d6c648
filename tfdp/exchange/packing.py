"""Several tensors in one flat buffer, and back."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

__all__ = ["pack", "unpack"]


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """One flat tensor with the elements of all, in order.

    Args:
      tensors: at least one, of one dtype, any shapes.
    """
    if len(tensors) == 1:
        return tf.reshape(tensors[0], [-1])
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def unpack(flat: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The inverse of `pack`: tensors shaped as those in `like`."""
    if len(like) == 1:
        return [_reshape_as(flat, like[0])]
    sizes = [
        tf.size(tensor)
        if tensor.shape.num_elements() is None
        else tensor.shape.num_elements()
        for tensor in like
    ]
    parts = tf.split(flat, sizes)
    return [_reshape_as(part, tensor) for part, tensor in zip(parts, like, strict=True)]


def _reshape_as(flat: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    if like.shape.is_fully_defined():
        return tf.reshape(flat, like.shape)
    result = tf.reshape(flat, tf.shape(like))
    result.set_shape(like.shape)
    return result
