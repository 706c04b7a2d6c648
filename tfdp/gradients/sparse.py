"""Gradients of embeddings: slices are gathered, not summed.

The sum of sparse gradients is the list of everybody's slices; whoever applies it
adds those with the same index. Every replica may bring another number of slices.
"""

from __future__ import annotations

import tensorflow as tf

from tfdp.collectives.engine import Engine

__all__ = ["all_reduce_slices"]


def all_reduce_slices(
    engine: Engine, slices: tf.IndexedSlices, rank: int
) -> tf.IndexedSlices:
    """The sum over all replicas, as `tf.IndexedSlices` in rank order.

    Args:
      engine: what carries them; always one level, because slices cannot be added
        on the way.
      slices: this replica's; the number of slices may differ between replicas.
      rank: the calling replica.

    Cost: (N - 1) times the bytes of values and indices per replica, two exchanges.
    """
    return tf.IndexedSlices(
        values=engine.all_gather(slices.values, rank),
        indices=engine.all_gather(slices.indices, rank),
        dense_shape=slices.dense_shape,
    )
