"""Loops of one's own: what stands around `strategy.run`."""

import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.fresh_python import run_python
from tests.support.package_source import REPOSITORY
from tests.support.parity import classification_data, dense_model, make_strategy
from tfdp.errors import ConfigurationError, SameRowsWarning

# Warnings come once in a process.
CONVERTED = """
import keras
import tensorflow as tf
import tfdp

tfdp.use_virtual_devices(2)
strategy = tfdp.DataParallelStrategy()
with strategy.scope():
    optimizer = tfdp.DistributedOptimizer(keras.optimizers.SGD(1.0))
    weight = keras.Variable(1.0)

@tf.function
def step(x):
    def replica_step(x):
        total = tfdp.losses.local_mean(tf.reduce_mean(x))
        if total > 1:  # AutoGraph has to make a tf.cond of it
            total = total * 2
        scaled = optimizer.scale_loss(total)
        optimizer.apply([scaled], [weight])
        return total
    totals = strategy.run(replica_step, args=(x,))
    if strategy.reduce("SUM", totals, axis=None) > 100:
        return tf.constant(-1.0)
    return strategy.reduce("MEAN", totals, axis=None)

print("results", float(step(tf.constant([1.0, 2.0]))), float(step(tf.constant([4.0]))))
"""


def test_autograph_converts_the_users_functions_and_warns_of_none(tmp_path):
    """Half of 1.5 is below 1; half of 4 is 2, doubled."""
    program = tmp_path / "program.py"  # AutoGraph reads the source
    program.write_text(CONVERTED)
    paths = {"PYTHONPATH": str(REPOSITORY)}
    finished = run_python(program, environment=paths)
    assert "results 0.75 4.0" in finished.stdout, finished.stderr
    assert "AutoGraph" not in finished.stderr


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "none"])
def test_the_losses_of_a_replica_without_rows_are_reduced(reduction):
    strategy = make_strategy(3)
    loss = keras.losses.MeanAbsoluteError(reduction)
    x = np.arange(1, 5, dtype="float32")[:, None]
    # Three rows and one; a row on its own leaves two replicas without any.
    dataset = tf.data.Dataset.from_tensor_slices((x, 0 * x)).batch(3)
    axis = 0 if reduction == "none" else None

    @tf.function
    def step(batch):
        losses = strategy.run(loss, args=batch)
        return [strategy.reduce(kind, losses, axis=axis) for kind in ("SUM", "MEAN")]

    batches = strategy.experimental_distribute_dataset(dataset)
    sums, means = zip(*(map(float, step(batch)) for batch in batches), strict=True)
    if reduction == "none":
        assert sums == (6.0, 4.0) and means == (2.0, 4.0)
    else:  # shares of the mean, one for each replica
        assert sums == (2.0, 4.0)
        assert means == pytest.approx((2 / 3, 4 / 3))


def test_values_by_row_are_not_added_row_by_row():
    strategy = make_strategy(2)
    dataset = tf.data.Dataset.from_tensor_slices(tf.ones([3])).batch(3)
    for batch in strategy.experimental_distribute_dataset(dataset):
        with pytest.raises(ConfigurationError, match=r"\(2,\), \(1,\).*axis=0"):
            strategy.reduce("SUM", batch, axis=None)
        assert float(strategy.reduce("SUM", batch, axis=0)) == 3.0


@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_scalar_variables_are_numbers(shard):
    """As one device's: a callback may ask for them at any time."""
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            optimizer = self.model.optimizer
            seen.append((int(optimizer.iterations), float(optimizer.learning_rate)))

    with make_strategy(2, shard=shard).scope():
        model = dense_model()
        model.compile(keras.optimizers.SGD(0.5), "mse", jit_compile=False)
    x, _ = classification_data(24)
    model.fit(x, x[:, :5], batch_size=12, verbose=0, callbacks=[Watch()])
    assert seen == [(1, 0.5), (2, 0.5)]
    with pytest.raises(TypeError):
        int(model.weights[0])


def test_a_static_loss_scale_divides_the_gradients_of_an_embedding():
    """They are slices, which Python cannot divide; stock Keras stops at that."""

    def trained(strategy, scale):
        with strategy.scope():
            keras.utils.set_random_seed(3)
            model = keras.Sequential(
                [
                    keras.Input((3,), dtype="int32"),
                    keras.layers.Embedding(5, 2),
                    keras.layers.Flatten(),
                    keras.layers.Dense(1),
                ]
            )
            inner = keras.optimizers.SGD(0.1, loss_scale_factor=scale)
            model.compile(tfdp.DistributedOptimizer(inner), "mse", jit_compile=False)
        x = np.random.default_rng(1).integers(0, 5, (7, 3))
        model.fit(x, x[:, :1] * 1.0, batch_size=4, shuffle=False, verbose=0)
        return model.get_weights()

    one = trained(tf.distribute.get_strategy(), None)
    # A power of two changes no bit; sums of four rows: 2 * 0.1 * 2 * 16 u * 10 in all.
    for mine, theirs in zip(trained(make_strategy(2), 8.0), one, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=4e-6)


def test_a_variable_is_assigned_to_another_one():
    """As target networks do; what is assigned is looked at when the step is traced."""
    strategy = make_strategy(2)
    with strategy.scope():
        target, source = (tf.Variable(v, trainable=False) for v in (0.0, 3.0))

    @tf.function
    def step():
        strategy.run(lambda: target.assign(source))

    step()
    assert float(target) == 3.0


class AsksForTheMean(keras.optimizers.SGD):
    """As some programs have it that divide by the replicas themselves elsewhere."""

    def _all_reduce_sum_gradients(self, grads_and_vars):
        gradients, variables = zip(*grads_and_vars, strict=True)
        context = tf.distribute.get_replica_context()
        means = context.all_reduce(tf.distribute.ReduceOp.MEAN, list(gradients))
        return zip(means, variables, strict=True)


def test_an_optimizer_that_asks_for_the_mean_itself_is_refused():
    """It is known when the step is traced once more, and nobody would call it then."""
    strategy = make_strategy(2)
    made = []
    with strategy.scope():
        weight = keras.Variable(0.0)

    @tf.function
    def step():
        def replica_step():
            if not made:
                made.append(AsksForTheMean(1.0))
                made[0].build([weight])
            made[0].apply([tf.ones([])], [weight])

        strategy.run(replica_step)

    with pytest.raises(ConfigurationError, match="which would not be called"):
        step()


class MakesItsOptimizer(keras.Model):
    """Its step makes the optimizer when it is first traced, and adds up its loss."""

    def __init__(self):
        super().__init__()
        self.weight = self.add_weight(shape=(), initializer="zeros")
        self.made = []

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tfdp.losses.local_sum(-tf.reduce_sum(data * self.weight))
        if not self.made:
            optimizer = tfdp.DistributedOptimizer(keras.optimizers.SGD(1.0))
            optimizer.build([self.weight])
            self.made.append(optimizer)
        self.made[0].apply(tape.gradient(loss, [self.weight]), [self.weight])
        return {"loss": loss}


def test_the_row_that_an_empty_replica_borrows_counts_for_no_optimizer():
    """Not for one either that was made in the step, so that nobody leads it."""
    with make_strategy(2).scope():
        model = MakesItsOptimizer()
        model.compile(jit_compile=False)
    model.fit(np.array([[1.0]], "float32"), batch_size=2, verbose=0)
    assert float(model.weight.value) == 1.0


def training(strategy):
    """A model, and a step of training it, as loops of one's own have it."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
        model.optimizer.build(model.trainable_variables)
    loss = keras.losses.MeanSquaredError()

    def step(x, y, table=None):
        with tf.GradientTape() as tape:
            value = loss(y, model(x))
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(value, variables), variables)
        return value

    return model, step


X = classification_data(24)[0]
ROWS = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(8)


def of_graph(strategy, graph):
    return lambda x, y: strategy.run(graph, (x, y))


LOOPS = {
    "eager": lambda strategy, step: lambda x, y: strategy.run(step, (x, y)),
    "by name": lambda strategy, step: (
        lambda x, y: strategy.run(step, kwargs={"x": x, "y": y})
    ),
    "arrays": lambda strategy, step: (
        lambda x, y: strategy.run(step, (x.numpy(), y.numpy()))
    ),
    "in a graph": lambda strategy, step: tf.function(
        lambda x, y: strategy.run(step, (x, y))
    ),
    "a graph": lambda strategy, step: of_graph(strategy, tf.function(step)),
}


@pytest.mark.worth_seconds(10)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_over_a_dataset_that_nobody_distributed(loop):
    strategy = make_strategy(2)
    _, step = training(strategy)
    run = LOOPS[loop](strategy, step)
    with pytest.warns(SameRowsWarning) as caught:
        for x, y in ROWS:
            run(x, y)
    [warning] = [w for w in caught if w.category is SameRowsWarning]  # once
    words = r"all 2 replicas the same tensor of shape \(8, 12\).*experimental_distrib"
    assert re.search(words, str(warning.message))


def test_what_replicas_may_all_be_given():
    """A table beside a batch, inputs of a model, values to assign, Keras' own loops."""
    strategy = make_strategy(2)
    model, step = training(strategy)
    with strategy.scope():
        rates = tf.Variable([0.0, 0.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", SameRowsWarning)
        for x, y in strategy.experimental_distribute_dataset(ROWS):
            strategy.run(step, (x, y, tf.ones([5])))
        strategy.run(model, (X,))
        strategy.run(lambda value: rates.assign(value), (tf.constant([0.1, 0.2]),))
        model.fit(ROWS, verbose=0)
        model.evaluate(X, X[:, :1], verbose=0)
        for loop in (model.train_on_batch, model.test_on_batch):
            loop(X, X[:, :1])
        model.predict_on_batch(X)
    alone = make_strategy(1)
    _, step = training(alone)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SameRowsWarning)
        for x, y in ROWS:
            alone.run(step, (x, y))


@pytest.mark.worth_seconds(3)
def test_two_calls_of_one_optimizer_in_a_step_are_two_updates():
    """Gradients are r + 1 on replica r: a sum of 6. float32 holds all results."""
    strategy = make_strategy(3)
    with strategy.scope():
        first = tf.Variable(tf.zeros([3]))
        second = tf.Variable(tf.zeros([3]))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([first, second])

    @tf.function
    def step():
        def replica():
            rank = tf.distribute.get_replica_context().replica_id_in_sync_group
            gradient = tf.cast(tf.fill([3], rank + 1), tf.float32)
            optimizer.apply([gradient, 10 * gradient], [first, second])
            optimizer.apply([-100 * gradient, gradient], [first, second])

        strategy.run(replica)

    step()
    for copy in first.values:
        np.testing.assert_array_equal(copy.numpy(), -6.0 * (1 - 100))
    for copy in second.values:
        np.testing.assert_array_equal(copy.numpy(), -6.0 * (10 + 1))
