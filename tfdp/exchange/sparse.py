"""Gradients of embeddings: rows of a table, with possibly repeated indices.

The sum of sparse gradients is the list of all replicas' rows; the optimizer adds those
of equal index. They may be added earlier where the update is the same: see
`tfdp.chain.table_rows`. Each replica may have another number of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp._private import names
from tfdp.exchange.packing import Tensors
from tfdp.exchange.wire_types import fitting_wire_dtype

# A smaller table's gradient goes into a bucket: an exchange of its own costs more.
SMALL_TABLE_BYTES = 16 * 2**10
# Sums of many 16-bit numbers would lose precision.
ADDED_AS = {tf.float16: tf.float32, tf.bfloat16: tf.float32}


@dataclasses.dataclass(frozen=True)
class RowSum:
    """How rows of a table are added, for `Transport.combine` of values and indices.

    Args:
      label: names the exchange.
      summed: add rows of equal index before and after they travel, so that each index
        is returned once. False: all rows, in rank order.
      wire_dtype: the type of float values between hosts; None: their own.
      dense_shape: that of the table.
    """

    label: str
    summed: bool
    wire_dtype: str | None = None
    dense_shape: tf.Tensor | None = None

    def combine(self, parts: Sequence[Tensors]) -> list[tf.Tensor]:
        """The rows of all parts, by `join_rows`."""
        slices = [tf.IndexedSlices(*part, self.dense_shape) for part in parts]
        joined = join_rows(slices, summed=self.summed)
        return [joined.values, joined.indices]

    def between_hosts(self, rows: Tensors, link: Any) -> Callable[..., list]:
        """The function that combines the arrays of all hosts of `link`: one exchange,
        or the whole table where that is smaller."""
        from tfdp.hosts.row_sums import RowExchange

        table = _table_shape(self.dense_shape) if self.summed else None
        fitting = fitting_wire_dtype(rows[:1], self.wire_dtype)
        exchange = RowExchange(table, self.label, fitting, self.summed)
        return lambda *arrays: list(exchange(link, *arrays))

    def narrow(self, rows: Tensors) -> list[tf.Tensor]:
        """The rows in types that a compiler's exchanges add."""
        values, indices = rows
        fitting = fitting_wire_dtype([values], self.wire_dtype)
        # A row of a table: 32 bits are enough, and XLA does not add 64.
        return [tf.cast(values, fitting or values.dtype), tf.cast(indices, tf.int32)]


def sum_slices(
    transport: Any, slices: tf.IndexedSlices, rank: Any, how: RowSum
) -> tf.IndexedSlices:
    """The sum over all replicas of any number of rows of a table, as rows."""
    how = dataclasses.replace(how, dense_shape=slices.dense_shape)
    rows = transport.combine([slices.values, slices.indices], rank, how)
    return tf.IndexedSlices(*rows, slices.dense_shape)


def sums_at_first(
    transport: Any, gradients: Sequence[Any], rank: int
) -> list[list[tf.Tensor]]:
    """The sums at the first replica, of slices the values, each index once, and the
    indices; elsewhere unspecified tensors. `transport` is an `InProcess`."""
    dense = [one for one in gradients if not isinstance(one, tf.IndexedSlices)]
    sums = iter(transport.reduce(dense, rank))
    return [
        transport.combine_at_first(
            [one.values, one.indices], rank, RowSum("", True, None, one.dense_shape)
        )
        if isinstance(one, tf.IndexedSlices)
        else [next(sums)]
        for one in gradients
    ]


def values_of(gradient: Any) -> tf.Tensor:
    """A dense gradient itself; of slices the values."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def with_values(gradient: Any, function: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """The function's result for a dense gradient; slices stay slices."""
    if not isinstance(gradient, tf.IndexedSlices):
        return function(gradient)
    values = function(gradient.values)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def values_once(gradient: Any) -> tf.Tensor:
    """A dense gradient itself; of slices the values, those of equal index added."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, places = tf.unique(gradient.indices)
    return tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))


def rows_once(gradient: Any) -> Any:
    """A dense gradient itself; slices with each index once."""
    is_rows = isinstance(gradient, tf.IndexedSlices)
    return merge_rows(gradient) if is_rows else gradient


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


def _table_shape(dense_shape: tf.Tensor | None) -> tuple[int, ...] | None:
    """The shape of the table; None where it is unknown before the step runs."""
    known = None if dense_shape is None else tf.get_static_value(dense_shape)
    return None if known is None else tuple(int(size) for size in known)


def travels_dense(slices: tf.IndexedSlices) -> bool:
    """Whether the table costs less than an exchange of rows; equal on all hosts."""
    shape = _table_shape(slices.dense_shape)
    if shape is None:
        return False
    return tf.TensorShape(shape).num_elements() * slices.dtype.size <= SMALL_TABLE_BYTES
