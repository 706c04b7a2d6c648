"""What layers do besides computing, in blocks that are computed twice."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import make_strategy
from tfdp.errors import ConfigurationError

ROWS, WORDS, LENGTH, WIDTH = 24, 9, 5, 6


class Inner(keras.layers.Layer):
    """Holds a layer that looks for the mask of what it is given."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.LSTM(4)

    def call(self, inputs):
        return self.inner(inputs)


class DrawsByKeras(keras.layers.Layer):
    def call(self, inputs):
        return keras.random.dropout(inputs, 0.5)


class DrawsByTensorFlow(keras.layers.Layer):
    def call(self, inputs):
        kept = tf.random.uniform(tf.shape(inputs)) > 0.5
        return inputs * tf.cast(kept, inputs.dtype)


class ReadsWhatItStores(keras.layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight(initializer="ones", trainable=False)

    def call(self, inputs):
        scaled = inputs * keras.ops.cast(self.factor, inputs.dtype)
        self.factor.assign(self.factor * 0.5 + 0.1)
        return scaled


class TakesMore(keras.layers.Layer):
    """Takes rows by name, and a constant that was made outside of all graphs."""

    def call(self, rows, extra=None):
        return rows["a"] * rows["b"] + extra


def constant_model():
    x = keras.Input((WIDTH,))
    hidden = keras.layers.Dense(WIDTH, "tanh")(x)
    more = TakesMore()({"a": hidden, "b": x}, extra=keras.ops.ones((WIDTH,)))
    return keras.Model(x, keras.layers.Dense(1)(more))


def sparse_model():
    x = keras.Input((WIDTH,), sparse=True)
    hidden = keras.layers.Dense(WIDTH, "tanh")(x)
    return keras.Model(x, keras.layers.Dense(1)(hidden))


class IsNotToldOfTraining(keras.layers.Layer):
    """Leaves it to Keras to tell the layers within."""

    def __init__(self):
        super().__init__()
        self.layers_within = [
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dropout(0.4, seed=3),
        ]

    def call(self, inputs):
        for layer in self.layers_within:
            inputs = layer(inputs)
        return inputs


class Block(keras.layers.Layer):
    """May be a block of others that are blocks."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential(
            [keras.layers.Dense(WIDTH, "tanh"), keras.layers.Dropout(0.4, seed=3)]
        )

    def call(self, inputs, training=None):
        return self.inner(inputs, training=training)


def remat_within(model, policy):
    for layer in model.layers:
        if isinstance(layer, Block):
            tfdp.remat(layer.inner)
    tfdp.remat(model, policy)


def stateful_model():
    x = keras.Input((WIDTH,), batch_size=12)
    row = keras.layers.Reshape((2, WIDTH // 2))(keras.layers.Dense(WIDTH)(x))
    hidden = keras.layers.LSTM(4, stateful=True)(row)
    return keras.Model(x, keras.layers.Dense(1)(hidden))


class Counts(keras.layers.Layer):
    """Divides by the mean of all inputs so far, and returns no tensor besides."""

    def build(self, shape):
        self.mean = keras.metrics.Mean()

    def call(self, inputs):
        self.mean.update_state(keras.ops.abs(inputs))
        return inputs / (self.mean.result() + 1.0)


def text_model(*layers):
    encoder = keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            keras.layers.Embedding(WORDS, WIDTH, mask_zero=True),
        ]
    )
    words = keras.Input((LENGTH,), dtype="int32")
    x = encoder(words)
    for layer in layers:
        x = layer(x)
    return keras.Model(words, keras.layers.Dense(1)(x))


def dense_model(*layers):
    return keras.Sequential(
        [
            keras.Input((WIDTH,)),
            keras.layers.Dense(WIDTH),
            *layers,
            keras.layers.Dense(1),
        ]
    )


MODELS = {
    "masks-of-a-model": lambda: text_model(keras.layers.LSTM(4)),
    "masks-within-a-layer": lambda: text_model(Inner()),
    "masks-of-means": lambda: text_model(keras.layers.GlobalAveragePooling1D()),
    "draws": lambda: dense_model(DrawsByKeras()),
    "state": lambda: dense_model(ReadsWhatItStores()),
    "renormalization": lambda: dense_model(
        keras.layers.BatchNormalization(momentum=0.5, renorm=True)
    ),
    "constants": constant_model,
    "sparse-rows": sparse_model,
    "training-not-told": lambda: dense_model(IsNotToldOfTraining()),
    "blocks-within-blocks": lambda: dense_model(Block()),
    "metric": lambda: dense_model(Counts()),
    "stateful": stateful_model,
    "function": lambda: dense_model(InAFunction(keras.layers.Dense(WIDTH, "tanh"))),
    # Keras opens no scope of autocasting for these.
    "half": lambda: dense_model(keras.layers.Dense(WIDTH, "tanh", dtype="bfloat16")),
}


class InAFunction(keras.layers.Layer):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.function = tf.function(lambda x: layer(x, training=True))

    def build(self, shape):
        self.layer.build(shape)

    def call(self, x):
        return self.function(x)


# What replicas would each have of their own is refused, or added up.
ON_ONE_DEVICE = ("metric", "stateful")


def trained(make, change, replicas=2, **options):
    with make_strategy(replicas).scope() if replicas > 1 else contextlib.nullcontext():
        keras.utils.set_random_seed(3)
        model = make()
        change(model)
        model.compile(keras.optimizers.SGD(0.2), "mse", **options)
    random = np.random.default_rng(1)
    y = random.normal(size=(ROWS, 1))
    x = random.normal(size=(ROWS, WIDTH)).astype("float32")
    if model.input_shape[1:] == (LENGTH,):
        x = random.integers(1, WORDS, (ROWS, LENGTH))
        x[::2, 2:] = 0
    if model.inputs[0].sparse:
        x = tf.sparse.from_dense(np.where(x > 0, x, 0))
    # Random numbers of the global generator: from here on the same.
    keras.utils.set_random_seed(4)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    model.fit(data, epochs=2, verbose=0)
    return model.get_weights()


@pytest.mark.worth_seconds(10)
@pytest.mark.parametrize("policy", ["each", "whole"])
@pytest.mark.parametrize("name", MODELS)
def test_the_second_pass_does_what_the_first_did(name, policy):
    options = {"jit_compile": False, "replicas": 1 if name in ON_ONE_DEVICE else 2}
    once = trained(MODELS[name], lambda model: None, **options)
    twice = trained(MODELS[name], lambda model: remat_within(model, policy), **options)
    for one, other in zip(once, twice, strict=True):
        # Four steps of 0.2 with gradients below 10, sums of some 100 numbers that are
        # rounded to u: 4 * 0.2 * 10 * 100 u = 5e-5. Another function's are 1e-3 off.
        np.testing.assert_allclose(one, other, rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    "layer, message",
    [
        (DrawsByTensorFlow, "draws random numbers by TensorFlow .RandomUniform."),
        (
            lambda: keras.layers.SpectralNormalization(keras.layers.Dense(WIDTH)),
            "assigns to .*kernel. while it computes",
        ),
        (
            lambda: InAFunction(keras.layers.Dropout(0.5)),
            "draws random numbers or assigns to a variable in a tf.function",
        ),
        (
            lambda: InAFunction(keras.layers.BatchNormalization()),
            "draws random numbers or assigns to a variable in a tf.function",
        ),
    ],
)
def test_what_would_be_another_function_is_refused(layer, message):
    with pytest.raises((ConfigurationError, ValueError), match=message):
        trained(lambda: dense_model(layer()), tfdp.remat, jit_compile=False)
