"""Numbers that a step computes from results of metrics are one device's."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tests.support.parity import classification_data, dense_model, make_strategy
from tfdp.errors import LocalMeanWarning
from tfdp.step.reports import DerivedReport, derivation_of


class Deriving(keras.Model):
    """Keras' guide to a train_step of one's own, with what its metrics make."""

    def __init__(self, more=lambda model, loss: {}):
        super().__init__()
        self.inner = dense_model()
        self.more = more
        self.mean = keras.metrics.Mean(name="loss")
        self.found = [
            keras.metrics.Precision(0.0, name="precision"),
            keras.metrics.Recall(0.0, name="recall"),
        ]

    def call(self, x):
        return self.inner(x)

    @property
    def metrics(self):
        return [self.mean, *self.found]

    def report(self, loss, y, logits):
        self.mean.update_state(loss)
        for metric in self.found:
            metric.update_state(ops.one_hot(y, logits.shape[-1]), logits)
        precision, recall = (metric.result() for metric in self.found)
        return {
            "loss": self.mean.result(),
            "perplexity": ops.exp(self.mean.result()),
            "f1": 2 * precision * recall / (precision + recall + 1e-7),
            "both": ops.stack([precision, recall])[1],
            **self.more(self, loss),
        }

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=logits)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self.report(loss, y, logits)

    def test_step(self, data):
        x, y = data
        logits = self(x)
        return self.report(self.compute_loss(x=x, y=y, y_pred=logits), y, logits)


def reported(strategy, more=lambda model, loss: {}, **options):
    """Each epoch's numbers; the last batch leaves all replicas but one without rows."""
    x, y = classification_data(samples=25)
    keras.utils.set_random_seed(2)
    scope = strategy.scope() if strategy else warnings.catch_warnings()
    with scope:
        model = Deriving(more)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, **options)
    fit = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, validation_data=(x[:11], y[:11]), **fit).history
    evaluated = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    return {**history, **{f"evaluated_{k}": v for k, v in evaluated.items()}}


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("steps", [1, 2])
def test_they_are_computed_from_the_results_over_all_replicas(replicas, steps):
    one = reported(None, steps_per_execution=steps)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        several = reported(make_strategy(replicas), steps_per_execution=steps)
    assert {"perplexity", "val_f1", "evaluated_both"} <= set(one)
    for name, numbers in one.items():
        # Means of 25 numbers and an exponential; a replica's own are off by 0.1.
        np.testing.assert_allclose(several[name], numbers, rtol=1e-5, err_msg=name)


def test_a_number_that_is_made_of_a_replicas_own_as_well_is_told():
    def more(model, loss):
        return {"entropy": model.mean.result() + tf.reduce_sum(model.inner.weights[0])}

    with pytest.warns(LocalMeanWarning, match="computed from a metric's result and"):
        reported(make_strategy(2), more)


def test_a_variable_that_a_step_returns_is_reported():
    """As the probability of an adaptive augmentation is."""

    class Returning(Deriving):
        def train_step(self, data):
            super().train_step(data)
            return {"rate": self.optimizer.learning_rate.value}

    with make_strategy(2).scope():
        model = Returning()
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    x, y = classification_data(9)
    history = model.fit(x, y, batch_size=9, verbose=0).history
    assert history["rate"] == [np.float32(0.01)]


def test_only_what_can_be_done_again_is():
    with tf.Graph().as_default():
        result = tf.constant(2.0) * 1.0
        noise = tf.random.normal([])

        def is_result(tensor):
            return tensor is result

        assert derivation_of(noise, is_result) is None
        assert isinstance(derivation_of(result + noise, is_result), DerivedReport)
        again = derivation_of(tf.exp(result) + 1.0, is_result).of([tf.constant(0.0)])
        with tf.compat.v1.Session() as session:
            assert session.run(again) == 2.0


def spread(y_true, y_pred):
    """One number for all rows of a batch."""
    return ops.mean(ops.square(y_pred - y_true))


class Spread(keras.metrics.Mean):
    """Hands one number for all rows on to Keras' mean."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(spread(y_true, y_pred))


class WrappedSpread(keras.metrics.MeanMetricWrapper):
    """The same, of a function."""

    def __init__(self):
        super().__init__(spread, name="spread")

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_true + 1.0, y_pred)


class ByRow(keras.metrics.Mean):
    """Hands a number for each row on, which Keras counts right."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(ops.mean(ops.square(y_pred - y_true), axis=-1))


class Weighing(keras.metrics.Mean):
    """Weighs its number itself."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        rows = ops.cast(ops.shape(y_true)[0], "float32")
        super().update_state(spread(y_true, y_pred), sample_weight=rows)


KINDS = {
    "function": lambda: spread,
    "subclass": lambda: Spread("spread"),
    "wrapper": WrappedSpread,
    "by-row": lambda: ByRow("spread"),
    "weighing": lambda: Weighing("spread"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("replicas", [2, 3])
def test_one_number_for_a_batch_counts_by_rows(replicas, run_eagerly, kind):
    def fitted(strategy):
        x, y = classification_data(samples=27)
        targets = np.eye(10, dtype="float32")[y % 10][:, :4]
        keras.utils.set_random_seed(2)
        with strategy.scope() if strategy else warnings.catch_warnings():
            model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(4)])
            model.compile(
                keras.optimizers.SGD(0.1),
                "mse",
                metrics=[KINDS[kind]()],
                run_eagerly=run_eagerly,
            )
        validation = (x[:11], targets[:11])
        fit = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
        return model.fit(x, targets, validation_data=validation, **fit).history

    one, several = fitted(None), fitted(make_strategy(replicas))
    assert "val_spread" in one
    for name, numbers in one.items():
        # As above; the mean of the replicas' own is off by 3e-2.
        np.testing.assert_allclose(several[name], numbers, rtol=1e-5, err_msg=name)
