"""Several tensors in one flat buffer, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.names import run_independently
from tfdp.plan.shards import ShardLayout

# What goes to Python and over a link costs some 65 microseconds, whatever its size:
# more than to copy so many bytes twice.
SMALL_BYTES = 1 << 16


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


class SmallTogether:
    """Tensors of which small ones that stand side by side travel as one.

    All elements keep their order, and so their place in a ring and their bits.

    Args:
      tensors: of any types and shapes; those of unknown shape travel by themselves.
    """

    def __init__(self, tensors: Sequence[tf.Tensor]):
        self._runs = _runs_of(tensors)
        #: What travels.
        self.packed = [run[0] if len(run) == 1 else pack(run) for run in self._runs]

    @property
    def shapes(self) -> list[list[list[int]]]:
        """By what travels, the shapes that were packed into it; [] of a lone one."""
        return [
            [tensor.shape.as_list() for tensor in run if len(run) > 1]
            for run in self._runs
        ]

    def unpack(self, results: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """What came in the place of each that travelled, as tensors like the first."""
        return [
            tensor
            for result, run in zip(results, self._runs, strict=True)
            for tensor in ([result] if len(run) == 1 else unpack(result, run))
        ]


def _runs_of(tensors: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    """Small tensors of one type that stand side by side together, each other alone."""
    runs: list[list[tf.Tensor]] = []
    for tensor in tensors:
        before = runs[-1][-1] if runs else None
        if (
            before is not None
            and before.dtype == tensor.dtype
            and _is_small(before)
            and _is_small(tensor)
        ):
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return runs


def _is_small(tensor: tf.Tensor) -> bool:
    elements = tensor.shape.num_elements()
    return elements is not None and elements * tensor.dtype.size <= SMALL_BYTES


def _reshape_as(flat: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    if like.shape.is_fully_defined():
        return tf.reshape(flat, like.shape)
    result = tf.reshape(flat, tf.shape(like))
    result.set_shape(like.shape)
    return result


# Several tensors cut into shards, in one buffer with a row per replica; and back.
#
# A row holds the shards of one replica, tensor after tensor, so a reduce-scatter of the
# rows gives each replica its shards of all tensors, and an all-gather of them the rows.


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


# Tensors cut into shards, and put together again.


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
