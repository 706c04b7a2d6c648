"""Metrics that a model does not list: made in the scope, held in a closure."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import make_strategy
from tfdp.errors import LocalStateWarning


class Doubled(keras.metrics.Mean):
    def update_state(self, values):
        return super().update_state(values * 2.0)


class Holder(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="holder")
        self.inner = keras.metrics.Mean(name="inner")

    def update_state(self, values):
        self.inner.update_state(values)

    def result(self):
        return self.inner.result()


class OfSteps(keras.metrics.Metric):
    """A mean over steps that counts them itself."""

    def __init__(self):
        super().__init__(name="of_steps")
        self.total = self.add_variable((), "zeros", name="total")
        self.steps = self.add_variable((), "zeros", name="steps")

    def update_state(self, loss):
        self.total.assign_add(loss)
        self.steps.assign_add(1.0)

    def result(self):
        return self.total / self.steps


def fitted(strategy, make_metrics, **compiled):
    """What the steps of a model report of metrics, and what warnings say."""
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        of_loss, of_rows = make_metrics()

        class Model(keras.Model):
            def train_step(self, data):
                x, y = data
                with tf.GradientTape() as tape:
                    y_pred = self(x, training=True)
                    loss = self.compute_loss(x, y, y_pred)
                variables = self.trainable_variables
                self.optimizer.apply(tape.gradient(loss, variables), variables)
                for metric in of_loss:
                    metric.update_state(loss)
                for metric in of_rows:
                    metric.update_state(y, y_pred)
                both = [*of_loss, *of_rows]
                return {metric.name: metric.result() for metric in both}

        inputs = keras.Input((3,))
        model = Model(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(0.01), "mse", **compiled)
    x = np.random.default_rng(0).normal(size=(21, 3)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logs = model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0)
    told = [str(w.message) for w in caught if w.category is LocalStateWarning]
    return logs.history, told


def means():
    of_loss = keras.metrics.Mean(name="mean"), keras.metrics.Sum(name="sum")
    return (*of_loss, Holder()), (keras.metrics.MeanSquaredError(name="rows"),)


@pytest.mark.parametrize(
    "padded, compiled",
    [
        (False, {"jit_compile": False}),
        (False, {"jit_compile": True}),
        (True, {"jit_compile": False}),
        (False, {"run_eagerly": True}),
    ],
)
def test_they_report_the_whole_loss(padded, compiled):
    strategy = tfdp.DataParallelStrategy(["CPU:0", "CPU:1"], pad_batches=padded)
    one, _ = fitted(None, means, jit_compile=False)
    many, told = fitted(strategy, means, **compiled)
    assert not told
    for name, expected in one.items():
        # 42 squares of errors, each of 4 terms, added in another order, and 8 updates
        # of weights, which move a loss by less than itself: 60 u = 4e-6 of it.
        np.testing.assert_allclose(many[name], expected, rtol=4e-6, err_msg=name)


def test_a_subclass_of_the_mean_does_too():
    def metrics():
        return (Doubled(name="doubled"),), ()

    one, _ = fitted(None, metrics)
    many, told = fitted(make_strategy(2), metrics)
    assert not told
    # As above.
    np.testing.assert_allclose(many["doubled"], one["doubled"], rtol=4e-6)


def test_steps_that_each_replica_counts_are_warned_of():
    _, told = fitted(make_strategy(2), lambda: ((OfSteps(),), ()), jit_compile=False)
    (message,) = told
    assert "'of_steps'" in message
    assert "1/2 of the loss" in message
