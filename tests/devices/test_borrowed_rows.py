"""Dummy rows are such that models can take them, and add zeros to sums."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp.tracing.rows import Rows, row_like

NONE = np.zeros([0], "int64")


@pytest.mark.parametrize(
    ("part", "row"),
    [
        (tf.zeros([0, 3], tf.int32), [[1, 0, 0]]),
        (tf.zeros([0], tf.uint8), [1]),
        (tf.zeros([0, 2], tf.bool), [[True, False]]),
        (tf.zeros([0, 2], tf.string), [[b"1", b"1"]]),
        (tf.zeros([0, 3]), [[0.25, 0.5, 0.75]]),
        (tf.zeros([0, 0, 2], tf.int64), [[[1, 0]]]),
        (tf.RaggedTensor.from_row_lengths(tf.zeros([0]), NONE), [[0.5]]),
        (tf.ragged.constant([[[1, 2], [3]]])[:0], [[[1]]]),
    ],
    ids=lambda value: getattr(getattr(value, "dtype", None), "name", ""),
)
def test_it_has_something_to_take_a_mean_of(part, row):
    found = row_like(part)
    assert found.dtype == part.dtype
    assert found.shape.rank == part.shape.rank
    lists = found.to_list() if isinstance(part, tf.RaggedTensor) else found.numpy()
    np.testing.assert_array_equal(lists, row)


def test_a_sparse_one_stores_nothing():
    part = tf.sparse.from_dense(np.zeros((0, 3), "float32"))
    np.testing.assert_array_equal(tf.sparse.to_dense(row_like(part)), np.zeros((1, 3)))


@pytest.mark.parametrize("present", [False, tf.constant(False)], ids=["known", "not"])
def test_a_replica_without_rows_adds_zeros(present):
    """Also where its dummy row gave an infinity, and to rows of a table."""
    rows, value = Rows(present), tf.constant([1.0, np.inf])
    for found in (rows.part(value), rows.part_of_gradient(value)):
        np.testing.assert_array_equal(found, [0.0, 0.0])
    slices = tf.IndexedSlices(value, tf.constant([3, 1]), tf.constant([5]))
    assert rows.part(slices).indices.shape == rows.part(slices).values.shape == [0]
    assert Rows().part(value) is Rows().part_of_gradient(value) is value


def test_padding_rows_have_weight_zero():
    rows = Rows.of_padded(tf.constant([2, 2, -2]))
    assert (rows.size, float(rows.count), float(rows.total)) == (3, 2.0, 2.0)
    np.testing.assert_array_equal(rows.weights(2), [[1.0], [1.0], [0.0]])
