"""Steps that move rows by the sign of a gradient of a loss, and other such steps."""

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


def trained(strategy, change, model_class=Moved, **options):
    x, y = classification_data(samples=41)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = model_class(change)
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
    "stopped": lambda x, gradient: x + tf.stop_gradient(0.1 * tf.sign(gradient)),
    "clipped": lambda x, gradient: tf.clip_by_value(x + tf.sign(gradient), -1.0, 1.0),
    "gradient": lambda x, gradient: x + 5.0 * gradient,
}
OTHERS = {
    "of all rows": lambda x, gradient: x + gradient / tf.norm(gradient),
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


def test_rows_moved_by_a_gradient_are_one_devices_eagerly():
    one, _ = trained(None, CHANGES["sign"], run_eagerly=True)
    several, _ = trained(make_strategy(3), CHANGES["sign"], run_eagerly=True)
    assert largest_difference(one, several) == 0.0


@pytest.mark.parametrize("change", OTHERS)
def test_what_may_be_another_on_each_replica_is_refused(change):
    with pytest.raises(ConfigurationError, match="moved by the gradient of a loss"):
        trained(make_strategy(2), OTHERS[change])


@pytest.mark.parametrize("move", [lambda g: 0.5 * g, tf.sign], ids=["step", "sign"])
def test_weights_moved_by_a_gradient_are_refused(move):
    """MAML's inner step: a replica has a part of that gradient."""

    class Inner(Moved):
        def train_step(self, data):
            x, y = data
            hidden, logits = self.inner.layers
            features = hidden(x)
            with tf.GradientTape() as outer:
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(x, y, logits(features))
                kernel = logits.kernel
                moved = kernel - move(tape.gradient(loss, kernel.value))
                loss = self.compute_loss(x, y, features @ moved)
            variables = [kernel]
            self.optimizer.apply(outer.gradient(loss, [kernel.value]), variables)
            return {"loss": loss}

    with pytest.raises(ConfigurationError, match="moved by the gradient of a loss"):
        trained(make_strategy(2), None, model_class=Inner)
