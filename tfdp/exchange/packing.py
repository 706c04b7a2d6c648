"""Several tensors in one flat buffer, and back."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

__all__ = ["SmallTogether", "pack", "unpack"]

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
