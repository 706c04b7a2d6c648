"""What a step stores of its share of the loss, or of gradients: told, or exact."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.conformance_fits import rows
from tests.support.parity import make_strategy
from tfdp.errors import LocalStateWarning

RATE = 0.1


def sum_of_all(values):
    return tf.distribute.get_replica_context().all_reduce("sum", values)


class Stores(keras.Model):
    """Moves its weights itself (`by_hand`), or keeps an average of its losses.

    Args:
      takes_all: whether it takes what all replicas have first.
    """

    def __init__(self, kind, takes_all):
        super().__init__()
        self.hidden, self.dense = keras.layers.Dense(4), keras.layers.Dense(5)
        self.kind, self.of_all = kind, sum_of_all if takes_all else lambda x: x
        self.average = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        return self.dense(keras.ops.tanh(self.hidden(x)))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.kind == "by hand":
            pairs = zip(self.trainable_variables, self.of_all(gradients), strict=True)
            for variable, gradient in pairs:
                variable.assign_sub(RATE * gradient)
            return {"loss": loss}
        if self.kind == "average":
            self.average.assign(0.9 * self.average + 0.1 * self.of_all(loss))
        if self.kind == "step to it":
            self.average.assign_add(0.1 * (self.of_all(loss) - self.average))
        self.optimizer.apply(gradients, self.trainable_variables)
        if self.kind == "behind":
            self.average.assign(0.9 * self.average + 0.1 * self.of_all(loss))
        return {"loss": loss}


KINDS = ["by hand", "average", "step to it", "behind"]


def trained(strategy, kind, takes_all=True):
    with strategy.scope():
        keras.utils.set_random_seed(2)
        model = Stores(kind, takes_all)
        model.compile(keras.optimizers.SGD(RATE), "mse", jit_compile=False)
    data = rows()
    y = np.random.default_rng(3).normal(size=(len(data["x"]), 5)).astype("float32")
    model.fit(data["x"], y, batch_size=7, epochs=2, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_is_told_where_it_is_the_replicas_own(kind):
    with pytest.warns(LocalStateWarning, match="has a part of their sum") as told:
        trained(make_strategy(2), kind, takes_all=False)
    assert len([one for one in told if one.category is LocalStateWarning]) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_is_one_devices_where_it_is_of_all(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalStateWarning)
        model = trained(make_strategy(2), kind)
    one = trained(tf.distribute.get_strategy(), kind)
    for mine, theirs in zip(model.weights, one.weights, strict=True):
        # Without the sum an average is off by 0.3, a weight by 0.08.
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=0, atol=2e-6)
