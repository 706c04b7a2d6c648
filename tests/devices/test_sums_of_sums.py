"""What is made of sums of sums is looked at once for each of them, not for each way."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.conformance_fits import rows
from tests.support.parity import copies, loss_and_gradients, make_strategy

# So many ways lead from the last difference to the first term: 2 ** 60.
HALVES = 60


def halved(x):
    """`x` itself, halved often and halved again: exact where nothing underflows.

    Not by x + x: sums of sums TensorFlow's own optimizer follows by each way.
    """
    for _ in range(HALVES):
        x = x - 0.5 * x
    return x * 2.0**HALVES


class Total(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="total")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, x):
        self.total.assign(self.total + halved(tf.reduce_sum(x)))

    def result(self):
        return self.total


class Storing(keras.layers.Layer):
    def build(self, shape):
        self.mean = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def call(self, x):
        self.mean.assign(halved(keras.ops.mean(x)))
        self.add_loss(halved(keras.ops.mean(x)) * 1e-3)
        return x


class Model(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.number, self.total = keras.metrics.Mean(name="number"), Total()

    def train_step(self, data):
        loss, gradients = loss_and_gradients(self, data)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.total.update_state(data[0])
        self.number.update_state(halved(tf.reduce_mean(data[0])))
        return {
            "loss": loss,
            "total": self.total.result(),
            "returned": halved(tf.reduce_mean(data[0] ** 2)),
        }


def by_local_mean(y, y_pred):
    own = tf.reduce_mean(tf.square(y_pred - tf.cast(y, y_pred.dtype)))
    return tfdp.losses.local_mean(halved(own))


def own_loss(reduce):
    """A loss that says "sum", and gives one number for all rows."""

    def call(self, y, y_pred):
        return halved(reduce(tf.square(y_pred - tf.cast(y, y_pred.dtype))))

    return type("Own", (keras.losses.Loss,), {"call": call})(reduction="sum")


def fitted(strategy, loss, kind=Model):
    with strategy.scope():
        keras.utils.set_random_seed(5)
        x = keras.Input((12,))
        model = kind(x, keras.layers.Dense(1)(Storing()(x)))
        model.compile(keras.optimizers.SGD(0.01), loss=loss)
    history = model.fit(**rows(12), batch_size=6, shuffle=False, verbose=0).history
    return model, {name: values[-1] for name, values in history.items()}


@pytest.mark.timeout(300)
@pytest.mark.worth_seconds(5)
@pytest.mark.parametrize("loss", [by_local_mean, "mse"], ids=["local_mean", "keras"])
def test_each_is_looked_at_once(loss):
    model, numbers = fitted(make_strategy(3), loss)
    alone, expected = fitted(tf.distribute.get_strategy(), loss)
    # Two steps of SGD: each value is a few additions away from one device's.
    for ours, one in zip(model.weights, alone.weights, strict=True):
        for copy in copies(ours):
            np.testing.assert_allclose(copy, one.numpy(), rtol=1e-5, atol=1e-6)
    assert numbers == pytest.approx(expected, rel=1e-5)
    assert len(expected) == 3


@pytest.mark.timeout(300)
@pytest.mark.worth_seconds(2)
@pytest.mark.parametrize("reduce", [tf.reduce_mean, tf.reduce_sum])
def test_a_loss_of_ones_own_is_looked_at_once(reduce):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fitted(make_strategy(2), own_loss(reduce), keras.Model)
    kinds = {one.category for one in told}
    # Of a sum no way ends at a mean: all of them were gone.
    assert tfdp.errors.LocalMeanWarning in kinds or reduce is tf.reduce_sum
