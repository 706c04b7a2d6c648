"""`all_gather` in a step: the rows of the whole batch, whoever has any."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import classification_data, make_strategy, train
from tfdp.errors import ConfigurationError


class Centred(keras.Model):
    """Predicts by how far a row is from the mean of the batch."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(5)
        self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            values = self(x, training=True)
            whole = gathered(values)
            centred = values - tf.reduce_mean(whole, axis=0)
            loss = self.compute_loss(x, y, centred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        replicas = tf.shape(gathered(tf.ones([1])))[0]
        self.rows.assign(tf.cast(tf.shape(whole)[0] + 100 * replicas, "float32"))
        return {"loss": loss}


def gathered(values):
    if not tf.distribute.has_strategy():
        return values
    return tf.distribute.get_replica_context().all_gather(values, axis=0)


def build():
    keras.utils.set_random_seed(2)
    return Centred()


def test_rows_that_fill_a_batch_up_are_refused():
    strategy = tfdp.DataParallelStrategy(["CPU:0", "CPU:1"], pad_batches=True)
    with pytest.raises(ConfigurationError, match="the padding would be in it"):
        train(strategy, build, data=classification_data(21), batch_size=8, epochs=1)


@pytest.mark.worth_seconds(5)
@pytest.mark.parametrize(
    "options",
    [{"replicas": 2}, {"replicas": 3, "engine": "tensorflow"}, {"replicas": 4}],
    ids=str,
)
@pytest.mark.parametrize("rows", [9, 11, 16])
def test_borrowed_rows_are_not_gathered(options, rows):
    """The last batch has 1, 3 or 8 rows; replicas without any compute on one."""
    data = classification_data(rows)
    (one, _), (several, _) = (
        train(strategy, build, data=data, batch_size=8, epochs=2)
        for strategy in (None, make_strategy(**options))
    )
    last = rows % 8 or 8
    # A number that each replica has is gathered from all of them.
    assert several.rows.numpy() == last + 100 * options["replicas"]
    for mine, theirs in zip(several.dense.weights, one.dense.weights, strict=True):
        # 4 steps of at most 0.5 * 3 with momentum: sums of 8 rows and 12 inputs.
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-6)
