"""Several tensors in one flat buffer, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdp._private.names import run_independently
from tfdp.plan.shards import ShardLayout

Tensors: TypeAlias = Sequence[tf.Tensor]
Layouts: TypeAlias = Sequence[ShardLayout]

# A Python callback over a link costs some 65 microseconds, whatever its size: more than
# copying this many bytes twice.
SMALL_BYTES = 1 << 16


def pack(tensors: Tensors) -> tf.Tensor:
    """One flat tensor with the elements of all, which have one dtype, in order."""
    if len(tensors) == 1:
        return tf.reshape(tensors[0], [-1])
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def unpack(flat: tf.Tensor, like: Tensors) -> list[tf.Tensor]:
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


class PackedSmall:
    """Packs runs of small tensors of one type; others stay separate.

    All elements keep their order, and so their place in a ring and their bits.
    """

    def __init__(self, tensors: Tensors):
        self._runs = _runs_of(tensors)
        #: The tensors to send.
        self.packed = [run[0] if len(run) == 1 else pack(run) for run in self._runs]

    @property
    def shapes(self) -> list[list[list[int]]]:
        """The shapes packed into each tensor to send; [] for an unpacked one."""
        return [
            [tensor.shape.as_list() for tensor in run if len(run) > 1]
            for run in self._runs
        ]

    def unpack(self, results: Tensors) -> list[tf.Tensor]:
        """The results of the packed tensors, as tensors like the originals."""
        return [
            tensor
            for result, run in zip(results, self._runs, strict=True)
            for tensor in ([result] if len(run) == 1 else unpack(result, run))
        ]


def _runs_of(tensors: Tensors) -> list[list[tf.Tensor]]:
    """Groups adjacent small tensors of one type; each other tensor is alone."""
    runs: list[list[tf.Tensor]] = []
    for tensor in tensors:
        before = runs[-1][-1] if runs else None
        follows = before is not None and before.dtype == tensor.dtype
        if follows and _is_small(before) and _is_small(tensor):
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


# Shards of several tensors in one buffer. A row holds the shards of one replica: a
# reduce-scatter of the rows gives each replica its shards of all tensors.


def with_static_shape(gradients: Sequence[Any], layouts: Layouts) -> list[tf.Tensor]:
    """The gradients as dense tensors of static shapes, which tf.tensordot's lack."""
    return [
        tf.ensure_shape(tf.convert_to_tensor(gradient), layout.shape)
        for gradient, layout in zip(gradients, layouts, strict=True)
    ]


def to_rows(tensors: Tensors, layouts: Layouts) -> list[tf.Tensor]:
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


def split_row(row: tf.Tensor, layouts: Layouts) -> list[tf.Tensor]:
    """The shards in one replica's row."""
    return tf.split(row, [layout.shard_elements for layout in layouts])


def join_rows(rows: tf.Tensor, layouts: Layouts) -> list[tf.Tensor]:
    """The whole tensors from the rows of all replicas, `[parts, row]`."""
    columns = tf.split(rows, [layout.shard_elements for layout in layouts], axis=1)
    return [
        tf.reshape(tf.reshape(column, [-1])[: layout.elements], layout.shape)
        for column, layout in zip(columns, layouts, strict=True)
    ]


def cut(flat: tf.Tensor, layout: ShardLayout, part: int) -> tf.Tensor:
    """The elements of shard `part`, without padding: a view where it is aligned."""
    start, stop = layout.bounds(part)
    return flat[start:stop]


def pad_shard(piece: tf.Tensor, layout: ShardLayout, part: int) -> tf.Tensor:
    """The shard with zeros appended to its full length."""
    missing = layout.shard_elements - layout.length(part)
    return tf.pad(piece, [[0, missing]]) if missing else piece


def shard_of(whole: tf.Tensor, layout: ShardLayout, part: Any) -> tf.Tensor:
    """Shard `part` of `whole`, flat and padded; `part` is a tensor on a TPU."""
    if not isinstance(part, int):
        size = layout.shard_elements
        missing = layout.parts * size - layout.elements
        flat = tf.pad(tf.reshape(whole, [-1]), [[0, missing]])
        return tf.ensure_shape(tf.slice(flat, [part * size], [size]), [size])
    return pad_shard(cut(tf.reshape(whole, [-1]), layout, part), layout, part)


def copied_shard(whole: tf.Tensor, layout: ShardLayout, part: int) -> tf.Tensor:
    """A copy of shard `part` of `whole`.

    An aligned piece is a view: a variable that takes it over and updates it in place
    would keep the memory of the whole tensor.
    """
    copied = tf.raw_ops.DeepCopy(x=shard_of(whole, layout, part))
    if not isinstance(copied, tf.__internal__.EagerTensor):
        # TensorFlow treats it as stateful: a replica that cuts a gathered tensor would
        # wait for another's copy, which waits for the gathering.
        run_independently(copied.op)
    return copied


def whole_from_parts(parts: Tensors, layout: ShardLayout) -> tf.Tensor:
    """The tensor from the elements of all its shards, without padding."""
    filled = [part for place, part in enumerate(parts) if layout.length(place)]
    return tf.reshape(tf.concat(filled, axis=0), layout.shape)


def whole_from_shards(shards: Tensors, layout: ShardLayout) -> tf.Tensor:
    """The tensor from all its shards, flat and padded."""
    flat = tf.concat(shards, axis=0)
    return tf.reshape(flat[: layout.elements], layout.shape)
