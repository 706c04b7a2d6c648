"""Metrics that a step of one's own updates, on batches that were filled up."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.conformance_fits import crossentropy
from tests.support.parity import classification_data
from tests.support.tpu_stand_in import StandInStrategy
from tfdp.errors import ConfigurationError


class Largest(keras.metrics.Metric):
    """A metric that takes no weights."""

    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_weight(shape=(), initializer="zeros", name="value")

    def update_state(self, values):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(values)))

    def result(self):
        return self.value


def own_metrics():
    return [
        keras.metrics.Mean(name="rows"),
        keras.metrics.Mean(name="weighted_rows"),
        keras.metrics.Mean(name="entries"),
        keras.metrics.Mean(name="number"),
        keras.metrics.Sum(name="total"),
        keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
        keras.metrics.MeanSquaredError(name="error"),
    ]


class OwnMetrics(keras.Model):
    def __init__(self, own):
        super().__init__()
        self.dense = keras.layers.Dense(5)
        self.own = own

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        per_row = keras.losses.sparse_categorical_crossentropy(
            y, y_pred, from_logits=True
        )
        one_hot = tf.one_hot(y, 5)
        given = {
            "rows": (per_row,),
            "weighted_rows": (per_row, tf.cast(y + 1, tf.float32)),
            "entries": (tf.square(y_pred - one_hot),),
            "number": (loss,),
            "total": (per_row,),
            "accuracy": (y, y_pred),
            "error": (one_hot, y_pred),
            "largest": (per_row,),
        }
        for metric in self.own:
            metric.update_state(*given[metric.name])
        return {metric.name: metric.result() for metric in self.own}


def fitted(strategy, own=own_metrics, reduction="sum_over_batch_size", **compiled):
    x, y = classification_data(samples=13)
    with (strategy or tf.distribute.get_strategy()).scope():
        keras.utils.set_random_seed(0)
        model = OwnMetrics(own())
        model.compile(
            keras.optimizers.SGD(0.05),
            crossentropy(reduction=reduction),
            jit_compile=False,
            **compiled,
        )
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    found = {metric.name: float(metric.result()) for metric in model.own}
    # Of a step of one's own a TPU's logs are those of the first core (docs/tpu.md).
    if not isinstance(strategy, StandInStrategy):
        assert history == {name: [value] for name, value in found.items()}
    return found


def mirrored():
    devices = [f"CPU:{i}" for i in range(4)]
    return tfdp.DataParallelStrategy(devices, pad_batches=True)


# Nothing says what a step makes of losses of rows; this one takes gradients of all.
@pytest.mark.filterwarnings("ignore::tfdp.errors.LocalMeanWarning")
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "none"])
@pytest.mark.parametrize(
    "strategy, eagerly",
    [(lambda: StandInStrategy(2), False), (mirrored, False), (mirrored, True)],
    ids=["tpu-2", "mirrored-4", "mirrored-4-eagerly"],
)
def test_own_metrics_leave_the_filling_out(strategy, eagerly, reduction):
    expected = fitted(None, reduction=reduction)
    got = fitted(strategy(), reduction=reduction, run_eagerly=eagerly)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        # Sums of 13 numbers after two updates; filling of 3 rows in 8 is a third.
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)


def test_a_metric_that_takes_no_weights_is_refused():
    with pytest.raises(ConfigurationError, match="'largest' is given rows"):
        fitted(mirrored(), own=lambda: [Largest()])
