"""Gradients of embeddings: rows of a table, with possibly repeated indices.

The sum of sparse gradients is the list of all replicas' rows; the optimizer adds those
of equal index. They may be added earlier where the update is the same: see
`tfdp.chain.table_rows`. Each replica may have another number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp._private import names

# A smaller table's gradient goes into a bucket: an exchange of its own costs more.
SMALL_TABLE_BYTES = 16 * 2**10
# Sums of many 16-bit numbers would lose precision.
ADDED_AS = {tf.float16: tf.float32, tf.bfloat16: tf.float32}


class RowSum(NamedTuple):
    """How rows of a table are added.

    Args:
      label: names the exchange.
      summed: add rows of equal index before and after they travel, so that each index
        is returned once. False: all rows, in rank order.
      wire_dtype: the type of float values between hosts; None: their own.
    """

    label: str
    summed: bool
    wire_dtype: str | None


def map_values(function: Callable[[tf.Tensor], Any], gradient: Any) -> Any:
    """`function` of a gradient, or of the values of rows, which keep their indices."""
    if not isinstance(gradient, tf.IndexedSlices):
        return function(gradient)
    values = function(gradient.values)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def merge_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same gradient with each index once, in the order of first occurrence.

    CPUs add the rows of one index one after the other, in their order: the same bits in
    every run. 16-bit floats are added in 32 bits.

    Cost: reads and writes the rows once.
    """
    if names.in_compiled_function():
        # XLA has no dynamic lengths. Optimizers treat a dense gradient equally.
        dense = tf.convert_to_tensor(slices)
        rows = tf.range(tf.shape(dense)[0], dtype=slices.indices.dtype)
        return tf.IndexedSlices(dense, rows, slices.dense_shape)
    with tf.device(slices.values.device):
        indices, places = tf.unique(slices.indices)
        values = tf.cast(slices.values, ADDED_AS.get(slices.dtype, slices.dtype))
        sums = tf.math.unsorted_segment_sum(values, places, tf.size(indices))
        sums = tf.cast(sums, slices.dtype)
    sums.set_shape([None, *slices.values.shape[1:]])
    return tf.IndexedSlices(sums, indices, slices.dense_shape)


def join_rows(parts: list[tf.IndexedSlices], *, summed: bool) -> tf.IndexedSlices:
    """Joins the rows of all parts, in order; with `summed` each index once."""
    first = parts[0]
    if len(parts) > 1:
        first = tf.IndexedSlices(
            tf.concat([part.values for part in parts], axis=0),
            tf.concat([part.indices for part in parts], axis=0),
            first.dense_shape,
        )
    return merge_rows(first) if summed else first


def table_shape(slices: tf.IndexedSlices) -> tuple[int, ...] | None:
    """The shape of the table; None where it is unknown before the step runs."""
    if slices.dense_shape is None:
        return None
    known = tf.get_static_value(slices.dense_shape)
    return None if known is None else tuple(int(size) for size in known)


def travels_dense(slices: tf.IndexedSlices) -> bool:
    """Whether the table costs less than an exchange of rows; equal on all hosts."""
    shape = table_shape(slices)
    if shape is None:
        return False
    return tf.TensorShape(shape).num_elements() * slices.dtype.size <= SMALL_TABLE_BYTES
