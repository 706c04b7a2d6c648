"""Several tensors in one flat buffer, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdp._private.names import run_independently
from tfdp.lint.registry import is_of_graph
from tfdp.plan.shards import OwnedLayout, ShardLayout

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


def whole_specs(shards: Tensors, layouts: Layouts) -> list[tf.TensorSpec]:
    """The shapes and types of the whole tensors, which are equal on all replicas."""
    return [
        tf.TensorSpec(layout.shape, shard.dtype)
        for shard, layout in zip(shards, layouts, strict=True)
    ]


def to_rows(tensors: Tensors, layouts: Layouts) -> list[tf.Tensor]:
    """Blocks of columns of the rows of all parts, `[parts, n]`, padded: one for each
    tensor in flat shards, and then one for all that have owners."""
    blocks, owned = [], _owned(layouts)
    for place, (tensor, layout) in enumerate(zip(tensors, layouts, strict=True)):
        if place not in owned:
            missing = layout.parts * layout.shard_elements - layout.elements
            flat = tf.pad(tf.reshape(tensor, [-1]), [[0, missing]])
            blocks.append(tf.reshape(flat, [layout.parts, layout.shard_elements]))
    if owned:
        shards = [
            [shard_of(tensors[place], layouts[place], part) for place in owned]
            for part in range(layouts[0].parts)
        ]
        blocks.append(tf.stack([_owned_part(own, layouts) for own in shards]))
    return blocks


def row_of(shards: Tensors, layouts: Layouts) -> tf.Tensor:
    """The row of one replica, from its shards: the inverse of `split_row`."""
    owned = _owned(layouts)
    parts = [shard for place, shard in enumerate(shards) if place not in owned]
    if owned:
        parts.append(_owned_part([shards[place] for place in owned], layouts))
    return tf.concat(parts, axis=0)


def split_row(row: tf.Tensor, layouts: Layouts, part: int) -> list[tf.Tensor]:
    """The shards in the row of part `part`."""
    owned = _owned(layouts)
    blocks = tf.split(row, _widths(layouts))
    if not owned:
        return blocks
    shapes = [layouts[place].shard_shape(part) for place in owned]
    sizes = list(map(math.prod, shapes))
    pieces = tf.split(blocks.pop(), [*sizes, _longest(layouts) - sum(sizes)])
    found = {
        place: tf.reshape(piece, shape)
        for place, piece, shape in zip(owned, pieces[:-1], shapes, strict=True)
    }
    flat = iter(blocks)
    return [
        found[place] if place in found else next(flat) for place in range(len(layouts))
    ]


def join_rows(rows: tf.Tensor, layouts: Layouts) -> list[tf.Tensor]:
    """The whole tensors from the rows of all replicas, `[parts, row]`."""
    if _owned(layouts):
        shards = [
            split_row(row, layouts, part)
            for part, row in enumerate(tf.unstack(rows, layouts[0].parts))
        ]
        return [
            whole_from_shards(own, layout)
            for own, layout in zip(zip(*shards, strict=True), layouts, strict=True)
        ]
    columns = tf.split(rows, _widths(layouts), axis=1)
    return [
        tf.reshape(tf.reshape(column, [-1])[: layout.elements], layout.shape)
        for column, layout in zip(columns, layouts, strict=True)
    ]


def is_mostly_padding(layouts: Layouts) -> bool:
    """Whether an all-reduce sends less than the rows, which are as long as the longest.

    2 n (N - 1) / N bytes for n bytes of tensors, and n' (N - 1) for rows of n' bytes.
    """
    elements = sum(layout.elements for layout in layouts)
    row = sum(_widths(layouts))
    return bool(_owned(layouts)) and layouts[0].parts * row > 2 * elements


def _owned(layouts: Layouts) -> list[int]:
    return [i for i, layout in enumerate(layouts) if isinstance(layout, OwnedLayout)]


def _longest(layouts: Layouts) -> int:
    """The most elements of tensors with owners that one part has."""
    owned = [layouts[place] for place in _owned(layouts)]
    return max(
        sum(layout.length(part) for layout in owned) for part in range(owned[0].parts)
    )


def _widths(layouts: Layouts) -> list[int]:
    """The columns of each block."""
    owned = _owned(layouts)
    flat = [each.shard_elements for i, each in enumerate(layouts) if i not in owned]
    return [*flat, _longest(layouts)] if owned else flat


def _owned_part(shards: Tensors, layouts: Layouts) -> tf.Tensor:
    """One part's shards of the tensors with owners: flat, padded to the longest."""
    flat = tf.concat([tf.reshape(shard, [-1]) for shard in shards], axis=0)
    return tf.pad(flat, [[0, _longest(layouts) - flat.shape[0]]])


def cut(flat: tf.Tensor, layout: ShardLayout, part: int) -> tf.Tensor:
    """The elements of shard `part`, without padding: a view where it is aligned."""
    start, stop = layout.bounds(part)
    return flat[start:stop]


def to_shard(piece: tf.Tensor, layout: ShardLayout, part: int) -> tf.Tensor:
    """Shard `part` from its elements: zeros appended, and in its shape."""
    shape = layout.shard_shape(part)
    missing = math.prod(shape) - layout.length(part)
    padded = tf.pad(piece, [[0, missing]]) if missing else piece
    return padded if len(shape) == 1 else tf.reshape(padded, shape)


def elements_of(shard: tf.Tensor, layout: ShardLayout, part: int) -> tf.Tensor:
    """The elements of shard `part`, flat and without padding: undoes `to_shard`."""
    flat = shard if shard.shape.rank == 1 else tf.reshape(shard, [-1])
    return flat[: layout.length(part)]


def among_zeros(shard: tf.Tensor, layout: ShardLayout, part: int) -> tf.Tensor:
    """The whole tensor with the elements of shard `part`, and zeros elsewhere."""
    start, stop = layout.bounds(part)
    own = elements_of(shard, layout, part)
    flat = tf.pad(own, [[start, layout.elements - stop]])
    return tf.reshape(flat, layout.shape)


def shard_of(whole: tf.Tensor, layout: ShardLayout, part: Any) -> tf.Tensor:
    """Shard `part` of `whole`, as it is stored; `part` is a tensor on a TPU."""
    if not isinstance(part, int):
        size = layout.shard_elements
        missing = layout.parts * size - layout.elements
        flat = tf.pad(tf.reshape(whole, [-1]), [[0, missing]])
        return tf.ensure_shape(tf.slice(flat, [part * size], [size]), [size])
    return to_shard(cut(tf.reshape(whole, [-1]), layout, part), layout, part)


def copied_shard(whole: tf.Tensor, layout: ShardLayout, part: int) -> tf.Tensor:
    """A copy of shard `part` of `whole`.

    An aligned piece is a view: a variable that takes it over and updates it in place
    would keep the memory of the whole tensor.
    """
    copied = tf.raw_ops.DeepCopy(x=shard_of(whole, layout, part))
    if is_of_graph(copied):
        # TensorFlow treats it as stateful: a replica that cuts a gathered tensor would
        # wait for another's copy, which waits for the gathering.
        run_independently(copied.op)
    return copied


def whole_from_parts(parts: Tensors, layout: ShardLayout) -> tf.Tensor:
    """The tensor from the elements of all its shards, without padding."""
    filled = [part for place, part in enumerate(parts) if layout.length(place)]
    return tf.reshape(tf.concat(filled, axis=0), layout.shape)


def whole_from_shards(shards: Tensors, layout: ShardLayout) -> tf.Tensor:
    """The tensor from all its shards."""
    parts = [elements_of(shard, layout, part) for part, shard in enumerate(shards)]
    return whole_from_parts(parts, layout)
