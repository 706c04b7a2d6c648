"""Several tensors in one flat buffer, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

from tfdp.plan.shards import Layouts

Tensors: TypeAlias = Sequence[tf.Tensor]

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


def whole_specs(parts: Tensors, layouts: Layouts) -> list[tf.TensorSpec]:
    """The shapes and types of the whole tensors, which are equal on all replicas."""
    return [
        tf.TensorSpec(layout.shape, part.dtype)
        for part, layout in zip(parts, layouts, strict=True)
    ]


def wholes_from_parts(parts: Sequence[Tensors], layouts: Layouts) -> list[tf.Tensor]:
    """Tensors from the elements of all parts of each, without padding."""
    wholes = []
    for of_tensor, layout in zip(parts, layouts, strict=True):
        filled = [part for place, part in enumerate(of_tensor) if layout.length(place)]
        wholes.append(tf.reshape(tf.concat(filled, axis=0), layout.shape))
    return wholes
