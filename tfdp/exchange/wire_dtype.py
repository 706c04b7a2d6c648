"""Gradients in fewer bytes on the way, where the strategy asks for it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

__all__ = ["are_gradients", "from_wire", "sum_gradients_and_state", "to_wire"]

_gradients_travel = contextvars.ContextVar("gradients_travel", default=False)


def are_gradients() -> bool:
    """Whether the exchange that is being built carries gradients alone."""
    return _gradients_travel.get()


def sum_gradients_and_state(
    gradients: Sequence[Any], state: Sequence[tf.Tensor]
) -> tuple[list[Any], list[tf.Tensor]]:
    """The sums over the replicas of gradients, and of other values, in their types.

    Both ride in the same buckets, unless the strategy rounds gradients on the way.
    """
    context = tf.distribute.get_replica_context()
    total = tf.distribute.ReduceOp.SUM
    reducer = getattr(tf.distribute.get_strategy().extended, "reducer", None)
    if getattr(reducer, "rounds_gradients", False):
        with _sending_gradients():
            sums = context.all_reduce(total, list(gradients)) if gradients else []
        return sums, context.all_reduce(total, list(state)) if state else []
    reduced = context.all_reduce(total, [*to_wire(gradients), *state])
    count = len(gradients)
    return from_wire(reduced[:count], gradients), reduced[count:]


@contextlib.contextmanager
def _sending_gradients() -> Iterator[None]:
    token = _gradients_travel.set(True)
    try:
        yield
    finally:
        _gradients_travel.reset(token)


def to_wire(gradients: Sequence[Any]) -> list[Any]:
    """The gradients as they travel: in the `wire_dtype` of the strategy, if any."""
    wire_dtype = getattr(tf.distribute.get_strategy().extended, "wire_dtype", None)
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
    dtype = tf.as_dtype(wire_dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            _cast(gradient.values, wire_dtype), gradient.indices, gradient.dense_shape
        )
    tensor = tf.convert_to_tensor(gradient)
    is_wider = tensor.dtype.is_floating and tensor.dtype.size > dtype.size
    return tf.cast(tensor, dtype) if is_wider and tensor.shape.rank else tensor


def _back(value: Any, dtype: tf.DType) -> Any:
    if isinstance(value, tf.IndexedSlices):
        values = tf.cast(value.values, dtype)
        return tf.IndexedSlices(values, value.indices, value.dense_shape)
    return tf.cast(value, dtype)
