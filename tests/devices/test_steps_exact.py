"""Steps and layers that take their losses themselves: one device's weights and reports.

What is reported is the history, `evaluate`, and what callbacks see after each batch.
The last batch leaves one replica without a row.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.conformance_fits import BATCH_SIZE
from tests.support.conformance_steps import STEPS
from tests.support.parity import make_strategy
from tests.support.slow_rows import covering
from tfdp.errors import LocalMeanWarning


class Logs(keras.callbacks.Callback):
    """What callbacks see after each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(dict(logs))

    def on_test_batch_end(self, batch, logs=None):
        self.seen.append(dict(logs))


def fit_and_evaluate(strategy, step, **options):
    with (strategy or tf.distribute.get_strategy()).scope():
        model = step.build()
        model.compile(
            keras.optimizers.SGD(0.1),
            step.loss,
            metrics=list(step.metrics) or None,
            jit_compile=False,
            **options,
        )
    start, logs = model.get_weights(), Logs()
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        history = model.fit(
            **step.data,
            batch_size=BATCH_SIZE,
            shuffle=False,
            verbose=0,
            callbacks=[logs],
        ).history
        report = model.evaluate(
            **step.data,
            batch_size=BATCH_SIZE,
            verbose=0,
            return_dict=True,
            callbacks=[logs],
        )
    return start, model.get_weights(), [history, report, *logs.seen]


def assert_same(name, strategy, **options):
    step = STEPS[name]
    start, one, reports_one = fit_and_evaluate(None, step, **options)
    _, several, reports = fit_and_evaluate(strategy, step, **options)
    # As in test_fits_exact.py; a sum over 7 rows has seven times its gradients, and the
    # weights stay below 10: 3 * 0.1 * 70 * 2 * 60 u = 1.5e-4 where nothing is divided.
    tolerance = 1.5e-4 if "reduction" in name else 2e-5
    for a, b, before in zip(one, several, start, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=tolerance)
        assert np.abs(a - before).max() > 10 * tolerance
    assert len(reports) == len(reports_one)
    for expected, got in zip(reports_one, reports, strict=True):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            # Sums of 15 rows and of some 12 numbers in each: 60 u, with room for the
            # logarithms and the updates before.
            np.testing.assert_allclose(
                got[key], value, rtol=2e-5, equal_nan=False, err_msg=key
            )


# What the others exercise is in these.
COVERING = (
    *("adversarial", "added-local-sum", "both-kinds", "endpoint", "loss-masks-rows"),
    *("reduction-none", "returned", "stock", "tokens-taken-apart", "tracker"),
)
COVERING_IN_EAGER_MODE = (
    *("added-and-synchronized", "adversarial", "both-kinds", "endpoint", "returned"),
    "stock",
)


@pytest.mark.quick
@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("name", covering(STEPS, COVERING))
def test_fit_and_evaluate_equal_one_device(name):
    assert_same(name, make_strategy(2))


@pytest.mark.parametrize("name", covering(STEPS, COVERING_IN_EAGER_MODE))
def test_eager_mode_equals_one_device(name):
    assert_same(name, make_strategy(2), run_eagerly=True)


def test_losses_that_are_no_rows_are_counted_where_a_replica_has_none():
    strategy, loss = make_strategy(2), keras.losses.MeanSquaredError()
    one_row = tf.data.Dataset.from_tensors(tf.ones([1, 3]))
    (batch,) = strategy.experimental_distribute_dataset(one_row)

    def step(x):
        twice = tf.concat([x, x], 0)
        return loss(twice, 2 * twice)

    # The mean of 6 ones; the second replica has no row.
    parts = strategy.experimental_local_results(strategy.run(step, args=(batch,)))
    assert [float(part) for part in parts] == [1.0, 0.0]
