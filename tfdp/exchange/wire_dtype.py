"""Gradients in a smaller type on the way, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.exchange.wire_types import is_wider_float

__all__ = ["from_wire", "to_wire"]


def to_wire(gradients: Sequence[Any], wire_dtype: str | None) -> list[Any]:
    """The gradients as they travel: in `wire_dtype`, if any."""
    if wire_dtype is None:
        return list(gradients)
    return [_cast(gradient, wire_dtype) for gradient in gradients]


def from_wire(reduced: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """What came, in the types of the `gradients` that were sent."""
    pairs = zip(reduced, gradients, strict=True)
    return [
        value if value.dtype == gradient.dtype else _back(value, gradient.dtype)
        for value, gradient in pairs
    ]


def _cast(gradient: Any, wire_dtype: str) -> Any:
    """Wider floats only; a scalar costs nothing and may be a count."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            _cast(gradient.values, wire_dtype), gradient.indices, gradient.dense_shape
        )
    tensor = tf.convert_to_tensor(gradient)
    is_wider = is_wider_float(tensor.dtype, wire_dtype)
    return tf.cast(tensor, wire_dtype) if is_wider and tensor.shape.rank else tensor


def _back(value: Any, dtype: tf.DType) -> Any:
    if isinstance(value, tf.IndexedSlices):
        values = tf.cast(value.values, dtype)
        return tf.IndexedSlices(values, value.indices, value.dense_shape)
    return tf.cast(value, dtype)
