"""Mistakes with scopes: one typed error that says what to move where."""

import sys
import types
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import (
    classification_data,
    dense_model,
    largest_difference,
    make_strategy,
)
from tfdp.errors import ConfigurationError, LocalStateWarning, ScopeError

X, Y = classification_data(samples=24)


def compile_model(model, optimizer="sgd"):
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    return model


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_model_made_outside(optimizer):
    model = dense_model()
    with make_strategy(2).scope():
        compile_model(model, optimizer)
    with pytest.raises(ScopeError, match=r"outside the scope[\s\S]*model = build\(\)"):
        model.fit(X, Y, verbose=0)


def compiled_within(strategy, make_optimizer):
    with strategy.scope():
        return compile_model(dense_model(), make_optimizer())


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda: "adam",
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 8.0),
        lambda: tfdp.DistributedOptimizer(keras.optimizers.SGD(0.1)),
    ],
)
def test_compiled_outside_trains_with_that_very_optimizer(make_optimizer):
    """Not built yet, it is nobody's; so are metrics."""
    strategy = make_strategy(2)
    optimizer = keras.optimizers.get(make_optimizer())
    accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    rate, counter = optimizer.learning_rate, optimizer.iterations
    with strategy.scope():
        model = dense_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=[accuracy], jit_compile=False)
    history = model.fit(X, Y, batch_size=7, shuffle=False, verbose=0).history
    assert model.optimizer is optimizer
    assert optimizer.learning_rate is rate and optimizer.iterations is counter
    assert int(counter) == 4

    expected = compiled_within(tf.distribute.get_strategy(), make_optimizer)
    expected.fit(X, Y, batch_size=7, shuffle=False, verbose=0)
    # Four updates of at most 0.1 with gradients below 10, each two sums of about 60
    # terms apart: 4 * 0.1 * 10 * 2 * 60 u.
    assert largest_difference(model, expected) < 3e-5
    copies = [c.numpy().tolist() for c in model.layers[0].kernel.value.values]
    assert copies[0] == copies[1]
    # The metrics' variables count every replica's rows once.
    assert history["accuracy"] == [float(accuracy.result())]
    assert accuracy.count.numpy() == len(X)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_dropout_made_outside_draws_as_one_made_within(jit_compile):
    """Replicas drew from one state in turn, and XLA could not reach it."""

    def trained(made_outside):
        keras.utils.set_random_seed(1)
        strategy = make_strategy(3)
        dropout = keras.layers.Dropout(0.4, seed=7) if made_outside else None
        with strategy.scope():
            hidden, logits = dense_model().layers
            dropout = dropout or keras.layers.Dropout(0.4, seed=7)
            layers = [keras.Input((12,)), hidden, dropout, logits]
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model = keras.Sequential(layers)
            model.compile("sgd", loss, jit_compile=jit_compile)
        with warnings.catch_warnings():
            warnings.simplefilter("error", LocalStateWarning)
            model.fit(X, Y, batch_size=12, shuffle=False, verbose=0)
        return model

    assert largest_difference(trained(True), trained(False)) == 0.0


def test_a_dropout_may_be_in_models_of_two_strategies():
    dropout = keras.layers.Dropout(0.4, seed=7)
    for replicas in (3, 2, 3):
        with make_strategy(replicas).scope():
            hidden, logits = dense_model().layers
            layers = [keras.Input((12,)), hidden, dropout, logits]
            model = compile_model(keras.Sequential(layers))
        model.fit(X, Y, batch_size=12, verbose=0)


def test_a_built_optimizer_made_outside():
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(dense_model().trainable_variables)
    with make_strategy(2).scope():
        model = compile_model(dense_model(), optimizer)
    with pytest.raises(ScopeError, match="made under no strategy.*is built already"):
        model.fit(X, Y, verbose=0)


def test_compiled_under_another_strategy():
    with make_strategy(2).scope():
        model = dense_model()
    with make_strategy(2).scope():
        compile_model(model)
    with pytest.raises(ScopeError, match="but the model trains under"):
        model.fit(X, Y, verbose=0)


def test_fit_within_another_scope():
    with make_strategy(2).scope():
        model = compile_model(dense_model())
    other = make_strategy(2)
    with other.scope(), pytest.raises(ScopeError, match="leave the other scope first"):
        model.fit(X, Y, verbose=0)


def test_a_dataset_distributed_twice():
    strategy = make_strategy(2)
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    distributed = strategy.experimental_distribute_dataset(dataset)
    with pytest.raises(ScopeError, match="distributed already"):
        strategy.experimental_distribute_dataset(distributed)


def entered(strategy):
    with strategy:
        pass


def fit_in_a_replica(strategy):
    with strategy.scope():
        model = compile_model(dense_model())
    strategy.run(lambda: model.fit(X, Y, verbose=0))


@pytest.mark.parametrize(
    "use, error, words",
    [
        (entered, ScopeError, r"write `with strategy.scope\(\):`"),
        (fit_in_a_replica, ScopeError, "one replica calls them, within strategy.run"),
        (
            lambda strategy: strategy.run(tf.ones(2)),
            ConfigurationError,
            r"takes a function .*args=\(batch,\).*Received: EagerTensor",
        ),
        (
            lambda strategy: strategy.reduce("average", tf.ones(2), axis=None),
            ConfigurationError,
            "one of 'SUM', 'MEAN'. Received: 'AVERAGE'",
        ),
        (
            lambda strategy: strategy.experimental_distribute_dataset(X),
            ConfigurationError,
            "a tf.data.Dataset of global batches.*Received: ndarray",
        ),
    ],
)
def test_a_strategy_that_is_used_otherwise(use, error, words):
    with pytest.raises(error, match=words):
        use(make_strategy(2))


@pytest.mark.parametrize("batch_size", [0, -8, 2.5, "8"])
def test_a_batch_size_that_is_none(batch_size):
    """Of 0 Keras makes its default, 32."""
    with make_strategy(2).scope():
        model = compile_model(dense_model())
    with pytest.raises(ConfigurationError, match=f"Received: {batch_size!r}"):
        model.fit(X, Y, batch_size=batch_size, verbose=0)
    model.fit(X, Y, batch_size=np.int64(8), verbose=0)


class Stepping(keras.Model):
    """A model with a step of its own; `step(model, x, y)` gives what it returns."""

    def __init__(self, step):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.step = step

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        return self.step(self, *data)


def without_gradient(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.constant(1.0)
    variables = model.trainable_variables
    model.optimizer.apply(tape.gradient(loss, variables), variables)
    return {"loss": loss}


@pytest.mark.parametrize(
    "step, loss, words",
    [
        (lambda model, x, y: None, "mse", "train_step.* returned None. Return a dict"),
        (without_gradient, "mse", "within the GradientTape"),
        (None, lambda y, outputs: None, "A loss function returned None"),
    ],
)
def test_a_step_without_what_it_needs(step, loss, words):
    with make_strategy(2).scope():
        model = dense_model() if step is None else Stepping(step)
        model.compile("sgd", loss, jit_compile=False)
    with pytest.raises(ConfigurationError, match=words):
        model.fit(X, Y, batch_size=8, verbose=0)


def test_a_dataset_of_another_strategy():
    strategy = make_strategy(2)
    with strategy.scope():
        model = compile_model(dense_model())
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    distributed = make_strategy(4).experimental_distribute_dataset(dataset)
    with pytest.raises(ScopeError, match="parts for 4 replicas, the strategy has 2"):
        model.fit(distributed, verbose=0)


def test_what_is_allowed_still_works():
    strategy = make_strategy(2)
    with strategy.scope():
        model = compile_model(dense_model())
        model.fit(X, Y, verbose=0)
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    model.fit(strategy.experimental_distribute_dataset(dataset), verbose=0)


def keras_2():
    """A module of a package `tf_keras`, whose functions use a strategy as Keras 2's."""
    module = types.ModuleType("tf_keras.src.engine")
    code = """
import tensorflow as tf

def make(): return tf.Variable([1.0])

def double(x): return 2.0 * x

def fit(step, x):
    strategy = tf.distribute.get_strategy()
    return strategy.run(step, (x,))

def scoped(strategy):
    with strategy.scope(): pass

def apply(gradient, variable):
    def update(own, change): own.assign_sub(change)
    extended = tf.distribute.get_strategy().extended
    extended.update(variable, update, args=(gradient,))
"""
    exec(code, vars(module))
    return module


@pytest.mark.parametrize("name", ["tf_keras.src.engine", "tensorflow.python.keras.x"])
def test_keras_2_is_refused(name, monkeypatch):
    """At its first variable, in its fit (of a model that was made outside, too), and
    where its optimizer, made outside of the scope, updates a weight in a loop."""
    old, strategy = keras_2(), make_strategy(2)
    with strategy.scope():
        weight = tf.Variable([1.0])

    @tf.function
    def loop():
        strategy.run(lambda: old.apply(tf.constant([1.0]), weight))

    uses = [
        lambda: old.make(),
        lambda: old.fit(tf.identity, tf.ones(2)),
        lambda: old.scoped(strategy),
        loop,
    ]
    monkeypatch.setitem(vars(old), "__name__", name)
    monkeypatch.setitem(sys.modules, name.rpartition(".")[0].removesuffix(".src"), old)
    for use in uses:
        with strategy.scope(), pytest.raises(ConfigurationError, match="in Keras 3"):
            use()


def test_keras_2_that_is_only_imported_is_no_matter(monkeypatch):
    """Nor is one of its models that a step only calls, such as a teacher."""
    old, strategy = keras_2(), make_strategy(2)
    monkeypatch.setitem(vars(old), "__name__", "tf_keras.src.engine")
    monkeypatch.setitem(sys.modules, "tf_keras", old)
    with strategy.scope():
        weight = tf.Variable([1.0])
    strategy.run(lambda: weight.assign(old.double(weight)))
    assert weight.numpy() == [2.0]
