"""A gradient penalty trains parts of weights as whole ones: gradients of gradients."""

import keras
import pytest
import tensorflow as tf

import tfdp
from tests.support.grids import HIDDEN, VOCABULARY, WORDS, grid, rows_of
from tests.support.parity import largest_distance, make_strategy, rounding_bound
from tfdp.errors import CollectiveError
from tfdp.exchange.in_process import InProcess

# Models without some of the layers that the rules are for.
pytestmark = pytest.mark.filterwarnings("ignore::tfdp.errors.LayoutWarning")

layers, ops = keras.layers, keras.ops
RULES = {
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": ("model", None),
    "attention/(query|key|value)/kernel": (None, "model", None),
    "attention/(query|key|value)/bias": ("model",),
    "attention/attention_output/kernel": ("model", None, None),
    "words/embeddings": ("model", None),
    "own/kernel": (None, "model"),
}
# 3 steps: 4 replicas have rows of different number; in the last, two have none.
ROWS, BATCH, STEPS, RATE = 16, 7, 3, 0.05


class Penalty(keras.Model):
    """Adds how far the gradient's norm of each row is from 1 (Gulrajani et al., 2017).

    The model returns where it takes the gradient, and its outputs.
    """

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                if x.dtype.is_floating:
                    inner.watch(x)
                point, outputs = self(x, training=True)
                total = tf.reduce_sum(tf.tanh(outputs))
            slope = inner.gradient(total, point)
            slope = tf.reshape(slope, [tf.shape(slope)[0], -1])
            loss = tfdp.losses.local_mean(
                tf.reduce_mean(tf.square(tf.norm(slope, axis=1) - 1.0))
                + tf.reduce_mean(tf.square(outputs - y))
            )
        weights = self.trainable_variables
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights, strict=True)
        )
        return {"loss": loss}


class Own(layers.Layer):
    """A class of the program's own, so that each member gathers its weight."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], HIDDEN), name="kernel")

    def call(self, inputs):
        return ops.tanh(ops.matmul(inputs, self.kernel))


def of_features(*stack):
    def build():
        inputs = keras.Input((12,))
        hidden = inputs
        for make, *options in stack:
            hidden = make(*options[:-1], name=options[-1])(hidden)
        return Penalty(inputs, [inputs, hidden])

    return build


def attention():
    inputs = keras.Input((3, 4))
    layer = layers.MultiHeadAttention(4, 4, name="attention")
    hidden = layers.Flatten()(layer(inputs, inputs))
    return Penalty(inputs, [inputs, layers.Dense(5, name="head")(hidden)])


def logits():
    """The gradient at the found words: through the products with all words."""
    inputs = keras.Input((WORDS,), dtype="int32")
    words = layers.ReversibleEmbedding(VOCABULARY, 8, name="words")
    found = words(inputs)
    outputs = words(ops.tanh(found), reverse=True)
    return Penalty(inputs, [found, ops.mean(outputs, axis=-1)[:, :5]])


MODELS = {
    "column": of_features(
        (layers.Dense, HIDDEN, "tanh", "up"), (layers.Dense, 5, "head")
    ),
    "row": of_features(
        (layers.Dense, HIDDEN, "tanh", "stem"), (layers.Dense, 5, "down")
    ),
    "column and row": of_features(
        (layers.Dense, HIDDEN, "tanh", "up"), (layers.Dense, 5, "down")
    ),
    "heads": attention,
    "lookup": logits,
    "gathered": of_features((Own, "own"), (layers.Dense, 5, "head")),
}


def trained_with_penalty(strategy, name):
    x, _ = rows_of(ROWS)
    y = x[:, 5:10]
    if name == "heads":
        x = x.reshape(ROWS, 3, 4) / 4.0  # a softmax that has slopes
    elif name == "lookup":
        x = (abs(x[:, :WORDS]) * 10).astype("int32") % VOCABULARY
    with (strategy or tf.distribute.get_strategy()).scope():
        keras.utils.set_random_seed(3)
        model = MODELS[name]()
        model.compile(keras.optimizers.SGD(RATE), jit_compile=False)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_penalty_is_that_of_one_device(name, monkeypatch):
    swap, swaps = InProcess.swap, []
    monkeypatch.setattr(
        InProcess, "swap", lambda *given: swaps.append(given) or swap(*given)
    )
    one = trained_with_penalty(None, name)
    # A row's gradient of both terms is below 20 (of each row alone: 10.6 at most).
    bound = rounding_bound(one, STEPS, BATCH, 20.0, RATE)
    assert bound < 1e-4  # without the second order, weights differ by 7e-3 and more
    for shape in [(2, 2), (1, 4)]:
        model = trained_with_penalty(grid(shape, RULES), name)
        distance = largest_distance(one.get_weights(), model.get_weights())
        assert distance < bound, shape
    assert bool(swaps) == (name != "gathered")


class PenaltyOfWeights(keras.Model):
    """Adds the squares of the loss's gradients with respect to the weights."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                errors = tf.square(self(x, training=True) - y)
                loss = tfdp.losses.local_mean(tf.reduce_mean(errors))
            slopes = inner.gradient(loss, weights)
            loss += tf.add_n([tf.reduce_sum(tf.square(one)) for one in slopes])
        tape.gradient(loss, weights)
        return {"loss": loss}


@pytest.mark.parametrize("option", ["layout", "shard"])
def test_a_penalty_on_gradients_of_parts_is_refused(option):
    """The sum over replicas would have been taken for a constant."""
    make = {
        "layout": lambda: grid((2, 2), RULES),
        "shard": lambda: make_strategy(2, shard="parameters"),
    }[option]
    with make().scope():
        inputs = keras.Input((12,))
        model = PenaltyOfWeights(inputs, layers.Dense(12, name="up")(inputs))
        model.compile("sgd", jit_compile=False)
    x, _ = rows_of(ROWS)
    with pytest.raises(CollectiveError, match="all_sum of each gradient"):
        model.fit(x, x, batch_size=BATCH, verbose=0)
