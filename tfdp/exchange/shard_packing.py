"""Several tensors cut into shards, in one buffer with a row per replica; and back.

A row holds the shards of one replica, tensor after tensor, so a reduce-scatter of the
rows gives each replica its shards of all tensors, and an all-gather of them the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.plan.shards import ShardLayout

__all__ = ["join_rows", "of_known_shape", "split_row", "to_rows"]


def of_known_shape(
    gradients: Sequence[Any], layouts: Sequence[ShardLayout]
) -> list[tf.Tensor]:
    """The gradients as dense tensors that know what they are cut by.

    A gradient may not know its shape (tf.tensordot's does not); its shards must.
    """
    return [
        tf.ensure_shape(tf.convert_to_tensor(gradient), layout.shape)
        for gradient, layout in zip(gradients, layouts, strict=True)
    ]


def to_rows(
    tensors: Sequence[tf.Tensor], layouts: Sequence[ShardLayout]
) -> list[tf.Tensor]:
    """Each tensor as `[parts, shard_elements]`, padded."""
    return [
        tf.reshape(
            tf.pad(
                tf.reshape(tensor, [-1]),
                [[0, layout.parts * layout.shard_elements - layout.elements]],
            ),
            [layout.parts, layout.shard_elements],
        )
        for tensor, layout in zip(tensors, layouts, strict=True)
    ]


def split_row(row: tf.Tensor, layouts: Sequence[ShardLayout]) -> list[tf.Tensor]:
    """The shards in one replica's row."""
    return tf.split(row, [layout.shard_elements for layout in layouts])


def join_rows(rows: tf.Tensor, layouts: Sequence[ShardLayout]) -> list[tf.Tensor]:
    """The whole tensors from the rows of all replicas, `[parts, row]`."""
    columns = tf.split(rows, [layout.shard_elements for layout in layouts], axis=1)
    return [
        tf.reshape(tf.reshape(column, [-1])[: layout.elements], layout.shape)
        for column, layout in zip(columns, layouts, strict=True)
    ]
