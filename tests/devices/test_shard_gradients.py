"""What a `train_step` of one's own does with gradients and weights at stage 3."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import make_strategy
from tfdp.errors import CollectiveError, ConfigurationError
from tfdp.losses import all_sum

RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 6)).astype("float32")
Y = RNG.normal(size=(22, 5)).astype("float32")


def all_reduce(values):
    return tf.distribute.get_replica_context().all_reduce("sum", values)


def scaled_by_norm(gradients):
    """Clipping by the norm over all weights, of which each replica has a part."""
    squares = tf.add_n([tf.reduce_sum(tf.square(one)) for one in gradients])
    norm = tf.sqrt(all_reduce(squares))
    return [one * (0.1 / tf.maximum(norm, 0.1)) for one in gradients]


CHANGES = {
    "as they are": lambda gradients: gradients,
    "halved": lambda gradients: [0.5 * one for one in gradients],
    "summed": all_reduce,
    "mean": lambda gradients: [one / 3.0 for one in all_reduce(gradients)],
    "sum of halves": lambda gradients: all_reduce([0.5 * one for one in gradients]),
    "own norm": lambda gradients: tf.clip_by_global_norm(gradients, 0.1)[0],
    "own norms": lambda gradients: [tf.clip_by_norm(one, 0.1) for one in gradients],
    "norm of all": scaled_by_norm,
}


class Changes(keras.Model):
    def __init__(self, change, moves=False):
        super().__init__()
        self.hidden, self.dense = keras.layers.Dense(4), keras.layers.Dense(5)
        self.hidden.build((None, 6))
        self.dense.build((None, 4))
        self.built = True
        self.change, self.moves = CHANGES[change], moves

    def call(self, inputs):
        return self.dense(keras.ops.tanh(self.hidden(inputs)))

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables
        if self.moves:
            variables[0].assign_add(0.1 * tf.ones(variables[0].shape))
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, variables)
        if self.moves:
            variables[0].assign_sub(0.1 * tf.ones(variables[0].shape))
        self.optimizer.apply(self.change(gradients), variables)
        return {"loss": loss}


def trained(strategy, *of_model, **options):
    with strategy.scope():
        keras.utils.set_random_seed(2)
        model = Changes(*of_model)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(optimizer, "mse", jit_compile=False, **options)
        optimizer.build(model.trainable_variables)
    model.fit(X, Y, batch_size=9, epochs=2, shuffle=False, verbose=0)
    return [weight.numpy() for weight in model.weights]


def assert_alike(found, one):
    for mine, theirs in zip(found, one, strict=True):
        # Six updates of 0.1 times gradients below 2, with momentum.
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=3e-6)


@pytest.mark.parametrize("change", ["as they are", "halved", "norm of all"])
def test_what_is_alike_on_all_replicas_may_scale_them(change):
    strategy = make_strategy(3, shard="parameters")
    one = trained(tf.distribute.get_strategy(), change)
    assert_alike(trained(strategy, change), one)


@pytest.mark.parametrize(
    "change", ["summed", "mean", "sum of halves", "own norm", "own norms"]
)
def test_what_would_mix_parts_is_refused(change):
    strategy = make_strategy(3, shard="parameters")
    with pytest.raises(ConfigurationError, match="part of the sum"):
        trained(strategy, change)


@pytest.mark.parametrize("replicas", [2, 3])
def test_weights_may_be_moved_around_a_gradient(replicas):
    """The replicas' copies of what they cut waited for each other, for ever."""
    found = trained(make_strategy(replicas, shard="parameters"), "as they are", True)
    assert_alike(found, trained(tf.distribute.get_strategy(), "as they are", True))


class ByHand(Changes):
    """Gradients of the mean of squares over all rows, by its formula."""

    def __init__(self):
        super().__init__("as they are")

    def train_step(self, data):
        x, y = data
        hidden = keras.ops.tanh(self.hidden(x))
        count = all_sum(tf.cast(tf.shape(x)[0], tf.float32))
        error = 2 * (self.dense(hidden) - y) / (5 * count)
        below = tf.matmul(error, self.dense.kernel, transpose_b=True) * (1 - hidden**2)
        pairs = [(x, below), (hidden, error)]
        products = [(tf.matmul(a, b, transpose_a=True), b) for a, b in pairs]
        found = [one for k, b in products for one in (k, tf.reduce_sum(b, 0))]
        self.optimizer.apply(found, self.trainable_variables)
        return {"rate": self.optimizer.learning_rate}


def test_gradients_by_hand_are_parts_of_the_sum():
    """One device, by Keras' loss and tape, on the whole batch."""
    one = trained(tf.distribute.get_strategy(), "as they are")
    sharded = make_strategy(3, shard="parameters")
    with sharded.scope():
        keras.utils.set_random_seed(2)
        model = ByHand()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
        model.optimizer.build(model.trainable_variables)
    model.fit(X, Y, batch_size=9, epochs=2, shuffle=False, verbose=0)
    assert_alike([weight.numpy() for weight in model.weights], one)


class Jacobian(Changes):
    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            outputs = self(x)
        tape.jacobian(outputs, self.trainable_variables)
        return {}


def test_a_jacobian_of_shards_is_refused():
    """TensorFlow repeats the sum of each row's gradient in an order of its own."""
    with make_strategy(2, shard="parameters").scope():
        model = Jacobian("as they are")
        model.compile("sgd", jit_compile=False)
    with pytest.raises(CollectiveError, match="jacobian of weights in shards"):
        model.fit(X, Y, batch_size=9, verbose=0)


def test_an_exchange_in_a_vectorized_map_is_refused():
    strategy = make_strategy(2)
    step = tf.function(
        lambda: strategy.run(lambda: tf.vectorized_map(all_sum, tf.ones([3, 2])))
    )
    with pytest.raises(CollectiveError, match=r"inside tf\.vectorized_map"):
        step()
