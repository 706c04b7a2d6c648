"""Batches in memory of their own.

What a Python generator or `tf.numpy_function` gives stays where it lies, in the
program's NumPy array, when it happens to be aligned to 64 bytes. TensorFlow's kernels
write their results over inputs that no other tensor uses, and do not know of the array.
Behind a strategy the first replica's part of a batch is such an input: a step wrote its
gradients over the targets, and a generator that gives the same arrays again trained on
those from then on (TensorFlow 2.21, stock strategies as well). These parts are copied.

Cost: one copy of each batch in the host's memory, in the input pipeline.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp._private import names
from tfdp._private.step_ops import PYTHON

__all__ = ["owned"]


def owned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """`dataset`, with elements that share no memory with what Python code holds."""
    if not _reads_python(dataset):
        return dataset
    is_unpacked = type(dataset.element_spec) is tuple

    def copy_element(*parts: Any) -> Any:
        element = parts if is_unpacked else parts[0]
        return tf.nest.map_structure(_copy, element, expand_composites=True)

    return dataset.map(copy_element)


def _copy(tensor: tf.Tensor) -> tf.Tensor:
    dtype = tensor.dtype
    is_plain = dtype.is_floating or dtype.is_integer or dtype.is_bool
    if not (is_plain or dtype.is_complex):
        return tensor  # strings are copied when they come
    # Not identity, which is the same memory; and as a stateful operation it is kept.
    return tf.ensure_shape(tf.raw_ops.DeepCopy(x=tensor), tensor.shape)


def _reads_python(dataset: tf.data.Dataset) -> bool:
    """Whether Python code runs somewhere in the pipeline."""
    return any(
        operation in PYTHON
        for stage in names.stages_of(dataset)
        for operation in names.operations_of(stage)
    )
