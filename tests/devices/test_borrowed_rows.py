"""The row that a host without any lends its replicas: one that models can take."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp.tracing.rows import row_like

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
