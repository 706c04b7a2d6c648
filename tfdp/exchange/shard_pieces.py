"""Tensors cut into shards, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.names import run_independently
from tfdp.plan.shards import ShardLayout

__all__ = [
    "cut",
    "own_piece",
    "pad_shard",
    "piece_of",
    "whole_from_parts",
    "whole_from_shards",
]


def cut(flat: tf.Tensor, layout: ShardLayout, part: int) -> tf.Tensor:
    """The elements of shard `part`, without its padding: a view where it is aligned."""
    start, stop = layout.bounds(part)
    return flat[start:stop]


def pad_shard(piece: tf.Tensor, layout: ShardLayout, part: int) -> tf.Tensor:
    """The shard from its elements: zeros are added where it is a short one."""
    missing = layout.shard_elements - layout.length(part)
    return tf.pad(piece, [[0, missing]]) if missing else piece


def piece_of(whole: tf.Tensor, layout: ShardLayout, part: Any) -> tf.Tensor:
    """Shard `part` of `whole`, flat and padded; `part` is a tensor on a TPU."""
    if not isinstance(part, int):
        size = layout.shard_elements
        missing = layout.parts * size - layout.elements
        flat = tf.pad(tf.reshape(whole, [-1]), [[0, missing]])
        return tf.ensure_shape(tf.slice(flat, [part * size], [size]), [size])
    return pad_shard(cut(tf.reshape(whole, [-1]), layout, part), layout, part)


def own_piece(whole: tf.Tensor, layout: ShardLayout, part: int) -> tf.Tensor:
    """Shard `part` of `whole` in memory of its own.

    An aligned piece is a view. A variable that takes it over, and updates it in place,
    would keep the memory of the whole for ever.
    """
    copied = tf.raw_ops.DeepCopy(x=piece_of(whole, layout, part))
    if not isinstance(copied, tf.__internal__.EagerTensor):
        # TensorFlow takes it for an operation with effects. A replica that cuts what
        # was gathered would wait for another's copy, which waits for the gathering.
        run_independently(copied.op)
    return copied


def whole_from_parts(parts: Sequence[tf.Tensor], layout: ShardLayout) -> tf.Tensor:
    """The tensor from the elements of all its shards, without their padding."""
    filled = [part for place, part in enumerate(parts) if layout.length(place)]
    return tf.reshape(tf.concat(filled, axis=0), layout.shape)


def whole_from_shards(shards: Sequence[tf.Tensor], layout: ShardLayout) -> tf.Tensor:
    """The tensor from all its shards, flat and padded."""
    flat = tf.concat(shards, axis=0)
    return tf.reshape(flat[: layout.elements], layout.shape)
