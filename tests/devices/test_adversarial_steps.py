"""Steps that move rows, or weigh them, by the gradient of a loss: a part of no loss."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import (
    classification_data,
    dense_model,
    largest_difference,
    make_strategy,
)
from tfdp.errors import ConfigurationError, LocalMeanWarning


class Moved(keras.Model):
    """Trains on rows that `change` makes of them and of the loss' gradient there."""

    def __init__(self, change):
        super().__init__()
        self.inner = dense_model()
        self.change = change

    def call(self, x, training=False):
        return self.inner(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = self.compute_loss(x, y, self(x, training=True))
        moved = self.change(x, tape.gradient(loss, x))
        with tf.GradientTape() as tape:
            first = self.compute_loss(x, y, self(x, training=True))
            second = self.compute_loss(moved, y, self(moved, training=True))
            loss = 0.5 * first + 0.5 * second
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def trained(strategy, change, **options):
    x, y = classification_data(samples=41)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = Moved(change)
        model.build((None, 12))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        options = {"jit_compile": False, **options}
        model.compile(keras.optimizers.SGD(0.1), loss, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        history = model.fit(x, y, batch_size=12, shuffle=False, verbose=0).history
    return model, history


CHANGES = {
    "sign": lambda x, gradient: x + 0.1 * tf.sign(gradient),  # FGSM
    "direction": lambda x, gradient: x + 0.1 * tf.math.l2_normalize(gradient, -1),
    "stopped": lambda x, gradient: x + tf.stop_gradient(0.1 * tf.sign(gradient)),
    "gradient": lambda x, gradient: x + 5.0 * gradient,
    "mask": lambda x, gradient: x * tf.cast(tf.abs(gradient) > 1e-3, x.dtype),
}


@pytest.mark.worth_seconds(4)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("replicas", [2, 3])
def test_rows_moved_by_a_gradient_are_one_devices(replicas, change):
    """Of 41 rows in batches of 12 the last has 5.

    A gradient by a row of a replica's share is that of the global mean by it.
    """
    one, expected = trained(None, CHANGES[change])
    several, found = trained(make_strategy(replicas), CHANGES[change])
    # 4 updates of 0.1 times gradients below 1.
    assert largest_difference(one, several) < 2e-6
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)


def test_eager_mode_cannot_tell_and_says_so():
    with pytest.raises(ConfigurationError, match="run_eagerly=True.*without it"):
        trained(make_strategy(2), CHANGES["sign"], run_eagerly=True)
