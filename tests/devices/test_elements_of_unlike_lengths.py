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
    with pytest.raises(tfdp.errors.DataError, match="a multiple of the 3 replicas"):
        strategy.experimental_distribute_dataset(zipped(labelled, unlabelled, True))
    data = strategy.experimental_distribute_dataset(zipped(labelled, unlabelled, False))
    message = "a multiple of the 3 replicas"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        next(iter(data))


def test_batches_that_are_filled_up_have_one_number_of_rows():
    strategy = tfdp.DataParallelStrategy([f"CPU:{n}" for n in range(3)], pad_batches=6)
    data = strategy.experimental_distribute_dataset(zipped(6, 9, False))
    with pytest.raises(tf.errors.InvalidArgumentError, match="different numbers"):
        next(iter(data))


@pytest.mark.worth_seconds(5)
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_batch_that_nobody_distributed(replicas):
    def trained_on(scope):
        with scope:
            keras.utils.set_random_seed(1)
            model = FixMatch()
            model.network.build((None, WIDTH))
            model.built = True
            model.compile(keras.optimizers.SGD(0.1), jit_compile=False)
        model.train_on_batch((X[:12], Y[:12]), U[:36])
        return model.get_weights()

    own = trained_on(make_strategy(replicas).scope())
    for a, b in zip(own, trained_on(contextlib.nullcontext()), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
