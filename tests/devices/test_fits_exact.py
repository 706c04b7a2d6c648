"""Losses as `fit` brings them about: one device's weights, history and report.

Class weights, sample weights, masks, several outputs, penalties; the last batch is
short and leaves one replica without a row.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.conformance_fits import (
    BATCH_SIZE,
    FITS,
    crossentropy,
    penalised_model,
    rows,
)
from tests.support.parity import make_strategy
from tests.support.slow_rows import covering


def fit_and_evaluate(strategy, build, loss, data, options):
    with (strategy or tf.distribute.get_strategy()).scope():
        model = build()
        model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False, **options)
    start = model.get_weights()
    history = model.fit(**data, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
    data = {k: v for k, v in data.items() if k != "class_weight"}
    report = model.evaluate(**data, batch_size=BATCH_SIZE, verbose=0, return_dict=True)
    return start, model.get_weights(), history.history, report


# What the others exercise is in these.
COVERING_FITS = (
    "class_weight",
    "masked",
    "regularizers-add_loss",
    "two-outputs-masked",
)


@pytest.mark.parametrize("name", covering(FITS, COVERING_FITS))
def test_fit_and_evaluate_equal_one_device(name):
    start, one, history_one, report_one = fit_and_evaluate(None, *FITS[name])
    _, several, history, report = fit_and_evaluate(make_strategy(2), *FITS[name])
    # 3 updates of 0.1 on gradients below 10 (features to 9, weights to 5, mean over 7
    # rows), each two sums of some 60 terms apart: 3 * 0.1 * 10 * 2 * 60 u = 2e-5. What
    # Keras alone gets wrong here is a share of one update: above 1e-2.
    for a, b, before in zip(one, several, start, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=2e-5)
        assert np.abs(a - before).max() > 2e-4
    assert history.keys() == history_one.keys()
    for key, values in history_one.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-5)
    assert report.keys() == report_one.keys()
    for key, value in report_one.items():
        np.testing.assert_allclose(report[key], value, rtol=1e-5)


def test_a_local_mean_of_no_rows_spoils_no_weight():
    """An empty replica's mean of no rows is not a number; its gradient is nothing."""
    row = penalised_model, crossentropy(), rows(), {}
    _, one, _, _ = fit_and_evaluate(None, *row)
    _, several, _, _ = fit_and_evaluate(make_strategy(2), *row)
    for a, b in zip(one, several, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=2e-5)


def test_a_local_mean_of_no_rows_is_reported_right():
    row = penalised_model, crossentropy(), rows(), {}
    _, _, _, expected = fit_and_evaluate(None, *row)
    _, _, _, report = fit_and_evaluate(make_strategy(2), *row)
    np.testing.assert_allclose(report["loss"], expected["loss"], rtol=1e-5)
