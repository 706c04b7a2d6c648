"""The graph of the update: traced for one replica, called by all; or for each.

For two, which are compared, where it is a person's own.

A function that replicas share gives what functions of their own give, bit for bit: the
reference is the same training with a function for each replica.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import make_strategy
from tfdp.optimizers import LAMB
from tfdp.step import shared_functions, shared_update

pytestmark = pytest.mark.timeout(250)

REPLICAS = 4
WORDS = 11


class Counted(keras.optimizers.SGD):
    """Counts the traces of an update."""

    traces = 0

    def update_step(self, gradient, variable, learning_rate):
        Counted.traces += 1
        super().update_step(gradient, variable, learning_rate)


class OfReplica(Counted):
    """Updates otherwise on the second replica: not what replicas may do alike."""

    def update_step(self, gradient, variable, learning_rate):
        rank = tf.distribute.get_replica_context().replica_id_in_sync_group
        gradient *= tf.cast(1 + rank, tf.float32)
        super().update_step(gradient, variable, learning_rate)


class Exchanging(Counted):
    """Sums over the replicas within its update."""

    def update_step(self, gradient, variable, learning_rate):
        Counted.traces += 1
        context = tf.distribute.get_replica_context()
        mean = context.all_reduce(tf.distribute.ReduceOp.MEAN, gradient)
        keras.optimizers.SGD.update_step(self, mean, variable, learning_rate)


OPTIMIZERS = {
    "adamw": functools.partial(
        keras.optimizers.AdamW, 0.01, global_clipnorm=0.5, use_ema=True
    ),
    "lamb": functools.partial(LAMB, 0.01),
    "rmsprop-schedule": lambda: keras.optimizers.RMSprop(
        keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5), centered=True
    ),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), dynamic_growth_steps=2
    ),
}


WRAPPERS = ("LossScaleOptimizer", "MultiOptimizer", "OptimizerMap")
# All that Keras has, but for those that wrap another one.
KERAS = {
    **OPTIMIZERS,
    **{
        name: functools.partial(getattr(keras.optimizers, name), 0.01)
        for name in dir(keras.optimizers)
        if isinstance(getattr(keras.optimizers, name), type)
        and name not in ("Optimizer", *WRAPPERS)
    },
}


@pytest.fixture(autouse=True)
def of_small_models(monkeypatch):
    monkeypatch.setattr(shared_update, "LEAST_VARIABLES", 1)


def data(rows=44):
    random = np.random.default_rng(3)
    words = random.integers(0, WORDS, (rows, 5))
    return words, random.normal(size=(rows, 2)).astype(np.float32)


def train(optimizer, replicas=REPLICAS, **options):
    """The model, with embeddings: some gradients are rows."""
    keras.utils.set_random_seed(5)
    strategy = make_strategy(replicas)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                keras.layers.Embedding(WORDS, 4),
                keras.layers.Flatten(),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(6, "tanh"),
                keras.layers.Dense(2),
            ]
        )
        model.compile(optimizer(), "mse", **options)
    # The last batch of each epoch is short, and not a multiple of the replicas.
    model.fit(*data(), batch_size=16, epochs=2, shuffle=False, verbose=0)
    return model


def copies_of(model):
    """What each replica holds of each variable that all have alike."""
    variables = [*model.trainable_variables, *model.optimizer.variables]
    return [[copy.numpy() for copy in v.value.values] for v in variables]


@pytest.mark.worth_seconds(7)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_shared_update_is_each_replicas_own(name, monkeypatch):
    shared = copies_of(train(OPTIMIZERS[name]))
    for knowing in ("are_alike", "is_shown_by_one"):
        monkeypatch.setattr(shared_functions, knowing, lambda *given: False)
    own = copies_of(train(OPTIMIZERS[name]))
    for there, here in zip(own, shared, strict=True):
        for copy in here:
            np.testing.assert_array_equal(copy, there[0])


@pytest.mark.worth_seconds(7)
@pytest.mark.parametrize("name", KERAS)
def test_two_traces_agree_with_what_one_shows(name, monkeypatch):
    shown, alike = [], []

    def is_shown_by_one(*given):
        shown.append(plain_shown(*given))
        return False

    def are_alike(*given):
        alike.append(plain_alike(*given))
        return alike[-1]

    plain_shown = shared_functions.is_shown_by_one
    plain_alike = shared_functions.are_alike
    monkeypatch.setattr(shared_functions, "is_shown_by_one", is_shown_by_one)
    monkeypatch.setattr(shared_functions, "are_alike", are_alike)
    train(KERAS[name], replicas=3)
    assert shown
    assert all(shown)
    assert alike == shown


def test_an_own_optimizer_is_traced_for_two_replicas():
    Counted.traces = 0
    variables = len(train(functools.partial(Counted, 0.1)).trainable_variables)
    assert Counted.traces == 2 * variables


@pytest.mark.worth_seconds(2)
def test_what_replicas_do_apart_each_does():
    Counted.traces = 0
    copies = copies_of(train(functools.partial(OfReplica, 0.1)))
    assert Counted.traces == REPLICAS * (len(copies) - 2)
    # All but the two numbers of the optimizer's own: steps and learning rate.
    for of_all in copies[:-2]:
        assert not np.array_equal(of_all[0], of_all[-1])


@pytest.mark.worth_seconds(3)
def test_an_update_with_an_exchange_is_each_replicas_own(monkeypatch):
    Counted.traces = 0
    summed = copies_of(train(functools.partial(Exchanging, 0.1)))
    # The first of them came as far as the first exchange, in vain.
    assert Counted.traces == REPLICAS * (len(summed) - 2) + 1
    monkeypatch.setattr(shared_update, "_can_be_shared", lambda *given: False)
    own = copies_of(train(functools.partial(Exchanging, 0.1)))
    for there, here in zip(own, summed, strict=True):
        for copy in here:
            np.testing.assert_array_equal(copy, there[0])


@pytest.mark.worth_seconds(3)
def test_calls_of_one_optimizer_are_told_apart():
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
    # The sum of 1, 2 and 3 is 6.
    for copy in first.values:
        np.testing.assert_array_equal(copy.numpy(), 594.0)
    for copy in second.values:
        np.testing.assert_array_equal(copy.numpy(), -66.0)
