"""What compressed sums keep from step to step, where `NaNGuard` leaves a step out.

As in test_nan_guard: everything is equal to the last bit to a training without the bad
batch. What was left to send is 0.1 of a weight here.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.devices.test_nan_guard import (
    BAD_BATCH,
    BATCH,
    SKIPS,
    bad_data,
    check_equal,
    compiled,
    fit,
    good_data,
    without_bad_batch,
)
from tests.support.parity import make_strategy
from tfdp.callbacks import NaNGuard
from tfdp.chain.compression import compression_entries

METHODS = {
    "top_k": lambda: tfdp.compression.TopK(0.1, min_bytes=0),
    "sign": lambda: tfdp.compression.SignSGD(min_bytes=0),
    "power": lambda: tfdp.compression.PowerSGD(1, start_step=0, min_bytes=0),
}


def compressing(method, **options):
    strategy = make_strategy(
        2, compression=METHODS[method](), compression_across="replicas"
    )
    return compiled(strategy, lambda: keras.optimizers.SGD(0.05), **options)


def check_all_equal(model, expected):
    check_equal(model, expected)
    of_model, of_expected = map(
        compression_entries, (model.optimizer, expected.optimizer)
    )
    assert of_model.keys() == of_expected.keys()
    assert len(of_model) > 1
    for name, rows in of_model.items():
        np.testing.assert_array_equal(rows.rows(), of_expected[name].rows(), name)


@SKIPS
@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("method", METHODS)
def test_a_bad_gradient_leaves_nothing_behind(method):
    model, guard = compressing(method), NaNGuard("skip")
    fit(model, bad_data(), guard)
    assert guard.skipped_steps == 1
    expected = compressing(method)
    fit(expected, without_bad_batch())
    check_all_equal(model, expected)


def infinite_for_class_5(labels, predictions):
    """Its gradients are finite; only predictions for real classes bring any."""
    infinite = tf.where(labels >= 5, np.inf, 0.0)
    labels = tf.minimum(labels, 4)
    values = keras.losses.sparse_categorical_crossentropy(labels, predictions, True)
    return values + tf.cast(tf.reshape(infinite, [-1]), values.dtype)


@SKIPS
@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("method", METHODS)
def test_a_bad_loss_alone_leaves_nothing_behind(method):
    x, y = good_data()
    y[BAD_BATCH * BATCH] = 5
    model, guard = compressing(method, loss=infinite_for_class_5), NaNGuard("skip")
    fit(model, (x, y), guard)
    assert guard.skipped_steps == 1
    expected = compressing(method, loss=infinite_for_class_5)
    fit(expected, without_bad_batch())
    check_all_equal(model, expected)


@SKIPS
@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("every", [2, 100])
@pytest.mark.parametrize("method", METHODS)
def test_who_goes_back_has_left_to_send_what_was_left_then(method, every):
    """With 100 to the start, when nothing was left yet."""
    x, y = good_data()
    x[3 * BATCH] = np.nan
    model = compressing(method)
    guard = NaNGuard("rollback", keep_every_steps=every)
    fit(model, (x, y), guard)
    assert (guard.rollbacks, guard.skipped_steps) == (1, 1)
    lost = (2, 3) if every == 2 else (0, 1, 2, 3)
    rows = ~np.isin(np.arange(len(x)) // BATCH, lost)
    expected = compressing(method)
    fit(expected, [part[rows] for part in good_data()])
    check_all_equal(model, expected)
