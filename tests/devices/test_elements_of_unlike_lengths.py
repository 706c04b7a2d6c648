"""Batches of labelled and unlabelled rows, of which there are more.

The reference is one device on all rows of both. Each replica has its part of both.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.fixmatch import WIDTH, FixMatch, U, X, Y, rows_of, trained
from tests.support.parity import make_strategy


@pytest.mark.worth_seconds(5)
@pytest.mark.parametrize("has_shapes", [True, False])
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("stage", [0, 3])
def test_fixmatch_is_that_of_one_device(replicas, has_shapes, stage):
    own, weights = trained(make_strategy(replicas, shard=stage).scope(), has_shapes)
    one, one_weights = trained(contextlib.nullcontext(), has_shapes)
    # Six updates of 0.1, tenfold by momentum, of gradients below 1 that are sums of 36
    # numbers rounded to u: 6 * 0.1 * 10 * 36 u = 1.3e-5, were all errors of one sign.
    for a, b in zip(weights, one_weights, strict=True):
        np.testing.assert_allclose(a, b, atol=1.3e-5)
    np.testing.assert_allclose(own["total"], one["total"], rtol=1e-5)
    np.testing.assert_allclose(own["seen"], one["seen"], rtol=1e-6)


def zipped(labelled, unlabelled, has_shapes):
    return tf.data.Dataset.zip(
        rows_of(X, labelled, has_shapes), rows_of(U, unlabelled, has_shapes)
    )


@pytest.mark.parametrize("has_shapes", [True, False])
def test_each_replica_has_its_part_of_both(has_shapes):
    strategy = make_strategy(3)
    data = strategy.experimental_distribute_dataset(zipped(6, 9, has_shapes))
    first, *_ = data
    local = strategy.experimental_local_results(first)
    np.testing.assert_array_equal(np.concatenate([x for x, _ in local]), X[:6])
    np.testing.assert_array_equal(np.concatenate([u for _, u in local]), U[:9])
    assert [len(x) for x, _ in local] == [2] * 3
    assert [len(u) for _, u in local] == [3] * 3


@pytest.mark.parametrize(("labelled", "unlabelled"), [(6, 8), (5, 9)])
def test_what_is_no_multiple_is_refused(labelled, unlabelled):
    strategy = make_strategy(3)
    with pytest.raises(
        tfdp.errors.DataError, match="a multiple of the number of replicas"
    ):
        strategy.experimental_distribute_dataset(zipped(labelled, unlabelled, True))
    data = strategy.experimental_distribute_dataset(zipped(labelled, unlabelled, False))
    message = "a multiple of the number of replicas"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        next(iter(data))


def test_fit_tells_the_lengths_alone():
    """TensorFlow's own error repeats them among the names of its operations."""

    def batches():
        yield X[:8], Y[:7]

    with make_strategy(2).scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(tfdp.errors.DataError, match="different numbers of rows: 8 7"):
        model.fit(batches(), steps_per_epoch=1, verbose=0)


def test_batches_that_are_filled_up_have_one_number_of_rows():
    strategy = tfdp.DataParallelStrategy([f"CPU:{n}" for n in range(3)], pad_batches=6)
    data = strategy.experimental_distribute_dataset(zipped(6, 9, False))
    with pytest.raises(tf.errors.InvalidArgumentError, match="different numbers"):
        next(iter(data))


def joined(rows):
    """Labels of rows that the model joins: each half of them belongs to one element."""
    halves = rows_of((X, X), rows, True)
    labels = tf.concat([tf.zeros(rows), tf.ones(rows)], 0)
    return halves.map(lambda a, b: ((a, b), labels))


def labelled(rows):
    labels = tf.concat([tf.zeros(rows), tf.ones(rows)], 0)
    return tf.data.Dataset.zip(
        rows_of((X, X), rows, True), tf.data.Dataset.from_tensors(labels).repeat()
    )


def two_views(rows, has_shapes=True):
    views = rows_of(X, rows, has_shapes).map(lambda x: tf.concat([x, 0.9 * x], 0))
    return tf.data.Dataset.zip(rows_of(X, rows, has_shapes), views)


def labels_in_batches(rows):
    parts = [rows_of(X, rows, True)] * 2
    labels = tf.data.Dataset.from_tensor_slices(np.repeat([0, 1], rows)).repeat()
    return tf.data.Dataset.zip(*parts, labels.batch(2 * rows, drop_remainder=True))


@pytest.mark.parametrize("make", [joined, labelled, two_views, labels_in_batches])
def test_rows_that_belong_together_are_not_parted(make):
    with pytest.raises(tfdp.errors.DataError, match=r"only in a tf.data.Dataset.zip"):
        make_strategy(2).experimental_distribute_dataset(make(6))


def test_rows_of_views_are_not_parted_where_shapes_do_not_tell():
    data = make_strategy(2).experimental_distribute_dataset(two_views(6, False))
    with pytest.raises(tf.errors.InvalidArgumentError, match="tf.data.Dataset.zip"):
        next(iter(data))


def test_a_zip_of_many_datasets_is_looked_at_at_once():
    """Of 48 datasets there are 2 ** 47 choices that might add up to one of them."""
    few, many = rows_of(X, 6, True), rows_of(U, 9, True)
    data = tf.data.Dataset.zip(*[few] * 47, many)
    first, *_ = make_strategy(3).experimental_distribute_dataset(data)
    local = make_strategy(3).experimental_local_results(first)
    assert [(len(parts[0]), len(parts[-1])) for parts in local] == [(2, 3)] * 3


def test_what_is_mapped_keeps_its_rows():
    u = rows_of(U, 9, True).map(lambda u: 2 * u).prefetch(1)
    data = tf.data.Dataset.zip({"x": rows_of((X, Y), 6, True), "u": u}).repeat(2)
    first, *_ = make_strategy(3).experimental_distribute_dataset(data)
    local = make_strategy(3).experimental_local_results(first)
    np.testing.assert_array_equal(np.concatenate([b["u"] for b in local]), 2 * U[:9])


def test_a_batch_that_nobody_distributed_has_one_length():
    with make_strategy(2).scope():
        model = FixMatch()
        model.network.build((None, WIDTH))
        model.built = True
        model.compile(keras.optimizers.SGD(0.1), jit_compile=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="different numbers"):
        model.train_on_batch((X[:12], Y[:12]), U[:36])
