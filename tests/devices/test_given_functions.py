"""`strategy.run` of a `tf.function`, and models whose `train_step` is one."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.function_loop import BATCH, Loop, X, Y
from tests.support.parity import make_strategy
from tfdp.errors import CollectiveError


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_a_loop_around_a_function_is_one_devices(in_graph, replicas):
    """Eager replicas that run a function with an exchange would wait for ever."""
    found = Loop(make_strategy(replicas)).trained(in_graph)
    one = Loop(tf.distribute.get_strategy()).trained(in_graph=True)
    for mine, theirs in zip(found, one, strict=True):
        # Six updates of 0.1 times gradients below 10, of sums of 8 terms.
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=5e-6)


def test_a_function_that_xla_compiles_runs_on_each_replica():
    strategy = make_strategy(2)
    double = tf.function(lambda x: 2.0 * tf.reduce_sum(x), jit_compile=True)
    dataset = tf.data.Dataset.from_tensor_slices(X[:BATCH]).batch(BATCH)
    for batch in strategy.experimental_distribute_dataset(dataset):
        parts = strategy.experimental_local_results(strategy.run(double, (batch,)))
    halves = [2.0 * X[:4].sum(), 2.0 * X[4:BATCH].sum()]
    np.testing.assert_allclose(parts, halves, rtol=1e-5)


def test_an_exchange_in_a_function_that_xla_compiles_is_refused():
    strategy = make_strategy(2)

    @tf.function(jit_compile=True)
    def total():
        context = tf.distribute.get_replica_context()
        return context.all_reduce("sum", tf.ones([3]))

    with pytest.raises(CollectiveError, match="jit_compile"):
        strategy.run(total)


class Decorated(keras.Model):
    """Keras' guide with `@tf.function` above the step."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.dense.build((None, 6))
        self.built = True

    def call(self, inputs):
        return self.dense(inputs)

    @tf.function
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


def fitted(strategy, run_eagerly=False):
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = Decorated()
        model.compile(
            keras.optimizers.SGD(0.1, global_clipnorm=0.1),
            "mse",
            metrics=["mae"],
            run_eagerly=run_eagerly,
            jit_compile=False,
        )
    options = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
    return model, model.fit(X, Y, **options).history


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["graph", "eager"])
def test_a_decorated_train_step_trains_and_reports_as_one_device(run_eagerly, replicas):
    model, history = fitted(make_strategy(replicas), run_eagerly)
    one, expected = fitted(tf.distribute.get_strategy())
    for mine, theirs in zip(model.weights, one.weights, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=0, atol=1e-6)
    for name, values in expected.items():
        # A replica's share of the loss is a third or a half of it.
        np.testing.assert_allclose(history[name], values, rtol=1e-5)


def weighted_loop(strategy):
    """Weights after three steps on batches of five rows with a weighted loss."""
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
        loss_of = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")

    def step(x, y, weights):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x), sample_weight=weights)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    run = tf.function(lambda batch: strategy.run(step, args=batch))
    data = X[:15], Y[:15], np.arange(1, 16, dtype="float32")
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(5)
    for batch in strategy.experimental_distribute_dataset(dataset):
        run(batch)
    return [weight.numpy() for weight in model.weights]


@pytest.mark.parametrize("replicas", [3, 4])
def test_a_loop_in_which_a_replica_has_no_row_is_one_devices(replicas):
    """Keras takes no mean of rows that are known to be none, where others exchange."""
    found = weighted_loop(make_strategy(replicas))
    one = weighted_loop(tf.distribute.get_strategy())
    for mine, theirs in zip(found, one, strict=True):
        # Three updates of 0.1 times gradients below 5.
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-6)
