"""`tf.summary` in a step: the first replica writes, so what it writes must be all's."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.util import event_pb2

from tests.support.parity import make_strategy
from tfdp.errors import LocalStateWarning


def plainly(model, x, loss, gradient):
    tf.summary.scalar("loss", loss)


def now_and_then(model, x, loss, gradient):
    with tf.summary.record_if(model.optimizer.iterations % 2 == 0):
        tf.summary.scalar("loss", loss)


@tf.function
def in_a_function(model, x, loss, gradient):
    tf.summary.scalar("loss", loss)


def of_a_gradient(model, x, loss, gradient):
    tf.summary.histogram("loss", gradient)


def of_a_metric(model, x, loss, gradient):
    tf.summary.scalar("loss", model.metrics[0].result())


def what_is_alike(model, x, loss, gradient):
    context = tf.distribute.get_replica_context()
    tf.summary.scalar("loss", context.all_reduce("sum", loss))
    tf.summary.scalar("rate", model.optimizer.learning_rate)
    tf.summary.histogram("weight", model.trainable_variables[0])
    tf.summary.scalar("rows", tf.shape(x)[0])
    tf.summary.image("first row", tf.reshape(x[:1], (1, 1, 1, 1)))


def fitted(folder, write):
    """What warnings say, and the losses that were written."""
    writer = tf.summary.create_file_writer(str(folder))

    class Model(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            variables = self.trainable_variables
            gradients = tape.gradient(loss, variables)
            self.optimizer.apply(gradients, variables)
            with writer.as_default(step=self.optimizer.iterations):
                write(self, x, loss, gradients[0])
            return {"loss": loss}

    with make_strategy(2).scope():
        inputs = keras.Input((1,))
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = Model(inputs, layer(inputs))
        model.compile("sgd", "mse", metrics=["mae"])
    x = np.arange(1.0, 9.0, dtype="float32")[:, None]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, 0 * x, batch_size=8, epochs=2, shuffle=False, verbose=0)
    writer.flush()
    (path,) = folder.iterdir()
    events = map(
        lambda record: event_pb2.Event.FromString(record.numpy()),
        tf.data.TFRecordDataset(str(path)),
    )
    written = [
        float(tf.make_ndarray(value.tensor))
        for event in events
        for value in event.summary.value
        if value.tag == "loss" and not value.tensor.tensor_shape.dim
    ]
    return [str(w.message) for w in caught if w.category is LocalStateWarning], written


@pytest.mark.parametrize(
    "write", [plainly, now_and_then, in_a_function, of_a_gradient, of_a_metric]
)
def test_what_one_replica_has_is_warned_of(tmp_path, write):
    told, _ = fitted(tmp_path, write)
    (message,) = told
    assert "tf.summary writes 'loss' of the first replica only" in message
    assert "losses.all_sum(loss)" in message


def test_what_all_have_is_written_without_a_word(tmp_path):
    told, written = fitted(tmp_path, what_is_alike)
    assert not told
    # The mean of the squares of 1 to 8, all of them whole numbers.
    assert written[0] == 25.5
