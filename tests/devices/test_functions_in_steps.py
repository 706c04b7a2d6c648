"""A `tf.function` with an exchange in it, which a replica calls more than once."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import (
    classification_data,
    dense_model,
    largest_difference,
    loss_and_gradients,
    make_strategy,
)
from tests.support.replica_steps import distribute

# Mixed up were a seventh to a half of the steps, or a step hung in the first ten.
STEPS = 60
STRATEGIES = {
    "2": lambda: make_strategy(2),
    "4": lambda: make_strategy(4),
    "2x2": lambda: make_strategy(4, hierarchy=(2, 2)),
    "3-tensorflow": lambda: make_strategy(3, engine="tensorflow"),
}


def over_replicas(value):
    return tf.distribute.get_replica_context().all_reduce("SUM", value)


def beside_each_other(function, x):
    return tf.stack([function(x), function(10 * x), function(100 * x)])


def behind_each_other(function, x):
    return function(function(x))


def forward_and_backward(function, x):
    @tf.custom_gradient
    def summed(x):
        return function(x), lambda upstream: function(1000 * upstream * x)

    with tf.GradientTape() as tape:
        tape.watch(x)
        total = summed(x)
    return tf.stack([total, tape.gradient(total, x)])


@pytest.mark.worth_seconds(12)
@pytest.mark.parametrize("made", STRATEGIES)
@pytest.mark.parametrize(
    "calls", [beside_each_other, behind_each_other, forward_and_backward]
)
def test_each_call_has_its_own_sum(calls, made):
    strategy = STRATEGIES[made]()
    replicas = strategy.num_replicas_in_sync
    rows = [np.float32(1 + rank) for rank in range(replicas)]
    total = sum(rows)
    wanted = {
        beside_each_other: [total, 10 * total, 100 * total],
        behind_each_other: replicas * total,
        forward_and_backward: [total, 1000 * total],
    }[calls]
    function = tf.function(over_replicas)

    @tf.function
    def run(x):
        return strategy.run(lambda x: calls(function, x), args=(x,))

    x = distribute(strategy, rows)
    for _ in range(STEPS):
        for found in strategy.experimental_local_results(run(x)):
            np.testing.assert_array_equal(found, np.float32(wanted))


class Critic(keras.Sequential):
    """Updates three times in a step, by one function."""

    def train_step(self, data):
        @tf.function
        def update(x, y):
            loss, gradients = loss_and_gradients(self, (x, y))
            self.optimizer.apply(gradients, self.trainable_variables)
            return loss

        return {"loss": [update(*data) for _ in range(3)][-1]}


@pytest.mark.parametrize("made", STRATEGIES)
def test_an_update_that_is_called_three_times(made):
    def fitted(strategy):
        with strategy.scope():
            model = Critic(dense_model().layers)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.05), loss, jit_compile=False)
        data = classification_data(24)
        model.fit(*data, batch_size=12, epochs=4, verbose=0, shuffle=False)
        return model

    one, several = fitted(tf.distribute.get_strategy()), fitted(STRATEGIES[made]())
    # 24 updates of 0.05 by gradients below 3, each a sum of 12 rows and 33 units.
    assert largest_difference(one, several) < 1e-5
