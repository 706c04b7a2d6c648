"""Norms of whole variables, and the ratio that they make."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import ops

__all__ = ["as_compute_tensor", "ratio_or_one", "sum_of_squares"]


def as_compute_tensor(value: Any, dtype: Any = None) -> Any:
    """`value` as a dense tensor of `dtype`, by default of float32 or wider.

    The square of a float16 above 255 overflows and one below 2e-4 vanishes, and
    bfloat16 keeps 8 bits, so norms and updates are computed in float32 and only the
    result goes back to the variable's dtype. Sparse gradients (`tf.IndexedSlices`, as
    an embedding makes) become dense: rows that occur twice must be summed before a
    norm is taken of them.
    """
    if isinstance(value, tf.IndexedSlices):
        value = tf.convert_to_tensor(value)
    dtype = keras.utils.standardize_dtype(dtype or value.dtype)
    return ops.cast(value, "float32" if dtype in ("float16", "bfloat16") else dtype)


def sum_of_squares(tensor: Any) -> Any:
    """The sum of the squares of all elements: a scalar of the tensor's dtype."""
    # `power`, not `square`, as Keras' Lamb has it: run eagerly the two may differ in
    # the last bit. A compiled graph turns this power into a square.
    return ops.sum(ops.power(tensor, 2))


def ratio_or_one(weight_norm: Any, update_norm: Any, denominator: Any) -> Any:
    """`weight_norm / denominator`, but 1 where either norm is 0.

    A zero weight would never leave 0 with a ratio of 0, and a zero update has no
    direction to scale. `where` computes both branches, hence the safe denominator.
    """
    both = ops.logical_and(weight_norm > 0, update_norm > 0)
    safe = ops.where(both, denominator, ops.ones_like(denominator))
    return ops.where(both, weight_norm / safe, ops.ones_like(weight_norm))
