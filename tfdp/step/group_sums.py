"""What replicas that step together give to sums over them, and do with the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.variables.local_view import LocalView

__all__ = [
    "SumOverHosts",
    "assign_local",
    "parts_of",
    "share_of_state",
    "summed_over_hosts",
    "times",
]

SumOverHosts = Callable[[tf.Tensor], tf.Tensor]


def parts_of(gradients: Sequence[Any]) -> list[list[tf.Tensor]]:
    """Tensors that a conditional can return: of slices their values and indices."""
    return [
        [g.values, g.indices] if isinstance(g, tf.IndexedSlices) else [g]
        for g in gradients
    ]


def times(gradient: Any, factor: tf.Tensor) -> Any:
    """The gradient times a scalar; slices stay slices."""
    factor = tf.cast(factor, gradient.dtype)
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient * factor
    values = gradient.values * factor
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def share_of_state(variable: LocalView, share: tf.Tensor, rank: int) -> tf.Tensor:
    """What the replica's own value is of a mean in which it has this share."""
    value = variable.local_copy(rank).read_value()
    share = tf.cast(share, value.dtype)
    # Statistics of no sample are not a number, and 0 times that is not 0.
    return tf.where(share > 0, value * share, tf.zeros_like(value))


def assign_local(
    variables: Sequence[LocalView], values: Sequence[tf.Tensor], rank: int
) -> None:
    """Stores a value in each of the replica's own variables."""
    for variable, value in zip(variables, values, strict=True):
        variable.local_copy(rank).assign(value)


def summed_over_hosts(
    sums: dict[Any, tf.Tensor], sum_over_hosts: SumOverHosts
) -> dict[Any, tf.Tensor]:
    """`sums` added up over the hosts, in one exchange for each type."""
    totals: dict[Any, tf.Tensor] = {}
    for dtype in sorted({value.dtype.name for value in sums.values()}):
        keys = [key for key, value in sums.items() if value.dtype.name == dtype]
        flat = [tf.reshape(sums[key], [-1]) for key in keys]
        lengths = tf.stack([tf.size(part) for part in flat])
        total = sum_over_hosts(tf.concat(flat, 0))
        pieces = tf.split(total, lengths, num=len(keys))
        for key, piece in zip(keys, pieces, strict=True):
            whole = tf.reshape(piece, tf.shape(sums[key]))
            totals[key] = tf.ensure_shape(whole, sums[key].shape)
    return totals
