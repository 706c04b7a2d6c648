"""Gradients of embeddings: slices are gathered, not summed.

The sum of sparse gradients is the list of everybody's slices; whoever applies it
adds those with the same index. Every replica may bring another number of slices.
"""

from __future__ import annotations

import tensorflow as tf

from tfdp.exchange.engine import Engine
from tfdp.exchange.wire_types import is_wider_float

__all__ = ["all_reduce_slices"]


def all_reduce_slices(
    engine: Engine,
    slices: tf.IndexedSlices,
    rank: int,
    wire_dtype: str | None = None,
) -> tf.IndexedSlices:
    """The sum over all replicas, as `tf.IndexedSlices` in rank order.

    Args:
      engine: what carries them; always one level, because slices cannot be added
        on the way.
      slices: this replica's; the number of slices may differ between replicas.
      rank: the calling replica.
      wire_dtype: the smaller float type in which the values travel; None for theirs.

    Cost: (N - 1) times the bytes of values and indices per replica, two exchanges.
    """
    values = slices.values
    if is_wider_float(values.dtype, wire_dtype):
        values = tf.cast(values, wire_dtype)
    return tf.IndexedSlices(
        values=tf.cast(engine.all_gather(values, rank), slices.values.dtype),
        indices=engine.all_gather(slices.indices, rank),
        dense_shape=slices.dense_shape,
    )
