"""Gradients that a program's own `tf.custom_gradient` functions return."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import largest_distance, make_strategy
from tfdp.errors import LocalMeanWarning


@tf.custom_gradient
def sum_with_the_gradient_of_a_mean(losses):
    rows = tf.cast(tf.shape(losses)[0], losses.dtype)
    return tf.reduce_sum(losses), lambda up: up * tf.ones_like(losses) / rows


@tf.custom_gradient
def centred_gradient(x):
    return tf.identity(x), lambda up: up - tf.reduce_mean(up, axis=0, keepdims=True)


@tf.custom_gradient
def clipped_by_the_norm_of_all(x):
    return tf.identity(x), lambda up: tf.clip_by_norm(up, 0.01)


@tf.custom_gradient
def reversed_gradient(x):
    return tf.identity(x), lambda up: -up


@tf.custom_gradient
def straight_through(x):
    return tf.round(x), lambda up: up


@tf.custom_gradient
def clipped_by_value(x):
    return tf.identity(x), lambda up: tf.clip_by_value(up, -0.02, 0.02)


@tf.custom_gradient
def clipped_by_row(x):
    return tf.identity(x), lambda up: tf.clip_by_norm(up, 0.01, axes=[1])


@tf.custom_gradient
def mean_by_hand(losses):
    rows = tf.cast(tf.shape(losses)[0], losses.dtype)
    return tf.reduce_mean(losses), lambda up: up * tf.ones_like(losses) / rows


KERNEL = keras.initializers.RandomNormal(seed=3)


class Scaled(keras.layers.Layer):
    """A weight that only the function with a gradient of its own reads."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        @tf.custom_gradient
        def scaled(x):
            value = tf.convert_to_tensor(self.scale)

            def gradient(up, variables=None):
                return up * value, [tf.reduce_sum(up * x)]

            return x * value, gradient

        return scaled(x)


class OfRows(keras.Model):
    """Rows pass through `of_rows`, their losses through `of_losses`."""

    def __init__(self, of_rows=tf.identity, of_losses=None):
        super().__init__()
        self.first = keras.layers.Dense(5, kernel_initializer=KERNEL)
        self.last = keras.layers.Dense(1, kernel_initializer=KERNEL)
        self.of_rows, self.of_losses = of_rows, of_losses

    def call(self, x):
        return self.last(self.of_rows(self.first(x)))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            if self.of_losses is None:
                loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
            else:
                loss = self.of_losses(tf.square(y - y_pred)[:, 0])
                loss = tfdp.losses.local_mean(loss)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def fitted(replicas, make, rows=24):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 3)).astype("float32")
    y = random.normal(size=(rows, 1)).astype("float32")
    with make_strategy(replicas).scope():
        model = make()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, y, batch_size=10, shuffle=False, verbose=0)
    return model.get_weights()


TOLD = {
    "counted": (
        lambda: OfRows(of_losses=sum_with_the_gradient_of_a_mean),
        "'sum_with_the_gradient_of_a_mean' with a tf.custom_gradient returned a "
        "gradient multiplied or divided by the number of rows",
    ),
    "centred": (lambda: OfRows(centred_gradient), "a number of all rows"),
    "clipped": (lambda: OfRows(clipped_by_the_norm_of_all), "a number of all rows"),
}
RIGHT = {
    "reversed": lambda: OfRows(reversed_gradient),
    "straight through": lambda: OfRows(straight_through),
    "clipped by value": lambda: OfRows(clipped_by_value),
    "clipped by row": lambda: OfRows(clipped_by_row),
    "a mean by hand": lambda: OfRows(of_losses=mean_by_hand),
    "a weight of its own": lambda: OfRows(Scaled()),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", TOLD)
def test_a_gradient_that_needs_all_rows_is_told(name):
    make, sentence = TOLD[name]
    with pytest.warns(LocalMeanWarning, match=sentence):
        fitted(2, make)


@pytest.mark.quick
@pytest.mark.parametrize("name", RIGHT)
def test_gradients_of_each_row_are_one_devices(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        several = fitted(3, RIGHT[name])
    # Three updates by a rate of 0.1; sums of 10 terms of size 1 round by 1e-6.
    assert largest_distance(several, fitted(1, RIGHT[name])) < 2e-6
