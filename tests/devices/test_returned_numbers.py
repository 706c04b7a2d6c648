"""Whole numbers and vectors that a step returns count by rows, as other numbers do.

The reference is one device on the whole batch.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import classification_data, dense_model, make_strategy
from tfdp.errors import LocalStateWarning

# The last batch has 5 rows, on 4 replicas 2, 1, 1 and 1; or one, on one replica alone.
BATCH = 8


class Returning(keras.Model):
    """Its steps return `take(labels, hits, loss)` beside the loss."""

    def __init__(self, take):
        super().__init__()
        self.inner, self.take = dense_model(), take

    def call(self, x):
        return self.inner(x)

    def report(self, y, logits, loss):
        predicted = tf.argmax(logits, -1, output_type=y.dtype)
        return {"loss": loss, **self.take(y, tf.equal(predicted, y), loss)}

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=logits)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self.report(y, logits, loss)

    def test_step(self, data):
        x, y = data
        logits = self(x)
        return self.report(y, logits, self.compute_loss(x=x, y=y, y_pred=logits))


def returned(strategy, take, rows, **options):
    with strategy.scope():
        model = Returning(take)
        model.compile(
            keras.optimizers.SGD(0.1),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            **{"jit_compile": False, **options},
        )
    x, y = classification_data(rows)
    arguments = {"batch_size": BATCH, "verbose": 0}
    logs = model.fit(x, y, shuffle=False, **arguments).history
    trained = {name: values[-1] for name, values in logs.items()}
    # Of each, the numbers of the last batch.
    return trained, model.evaluate(x, y, return_dict=True, **arguments)


def means(labels, hits, loss):
    """Means over rows, and what all replicas have alike."""
    values = tf.cast(hits, tf.float32)[:, None] * tf.one_hot(labels, 5)
    return {
        "by class": tf.reduce_mean(values, axis=0),
        "of a matrix": tf.reduce_mean(values[:, None] * tf.ones([1, 2, 1]), axis=0),
        "losses": tf.stack([loss, 2.0 * loss]),
        "seven": tf.constant(7, tf.int64),
        "large": tf.constant(2**40 + 1, tf.int64),
        "sizes": tf.constant([3, 4]),
    }


@pytest.mark.parametrize("rows", [21, 17])
@pytest.mark.parametrize("is_eager", [False, True])
def test_means_are_those_of_one_device(rows, is_eager):
    found = returned(tf.distribute.get_strategy(), means, rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalStateWarning)
        mine = returned(make_strategy(4), means, rows, run_eagerly=is_eager)
    for logs, expected in zip(mine, found, strict=True):
        assert logs.keys() == expected.keys()
        for name, value in expected.items():
            # Sums of at most 8 float32 numbers, and weights after three updates; an
            # unweighted mean would be off by a tenth of a class' mean.
            np.testing.assert_allclose(logs[name], value, rtol=1e-5, err_msg=name)
        assert logs["seven"] == 7 and logs["large"] == 2**40 + 1
        assert np.asarray(logs["sizes"]).tolist() == [3, 4]


@pytest.mark.parametrize(
    "take",
    [
        lambda labels, hits, loss: {"hits": tf.reduce_sum(tf.cast(hits, tf.int32))},
        lambda labels, hits, loss: {"last": labels[-1]},
        lambda labels, hits, loss: {"counts": tf.math.bincount(labels, minlength=5)},
        lambda labels, hits, loss: {
            "largest": tf.reduce_max(tf.one_hot(labels, 5), axis=0)
        },
        lambda labels, hits, loss: {"rows": tf.cast(hits, tf.float32)},
    ],
    ids=["sum", "row", "histogram", "largest", "rows"],
)
def test_what_is_no_mean_over_rows_is_warned_of(take):
    with pytest.warns(LocalStateWarning, match="a number is returned for all rows"):
        returned(make_strategy(2), take, 16)
