"""What layers do besides computing, in blocks that are computed twice."""

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
    # Keras opens no scope of autocasting for these.
    "half": lambda: dense_model(keras.layers.Dense(WIDTH, "tanh", dtype="bfloat16")),
}


def trained(make, change, **options):
    with make_strategy(2).scope():
        keras.utils.set_random_seed(3)
        model = make()
        change(model)
        model.compile(keras.optimizers.SGD(0.2), "mse", **options)
    random = np.random.default_rng(1)
    y = random.normal(size=(ROWS, 1))
    x = random.normal(size=(ROWS, WIDTH)).astype("float32")
    if model.input_shape == (None, LENGTH):
        x = random.integers(1, WORDS, (ROWS, LENGTH))
        x[::2, 2:] = 0
    if model.inputs[0].sparse:
        x = tf.sparse.from_dense(np.where(x > 0, x, 0))
    # Random numbers of the global generator: from here on the same.
    keras.utils.set_random_seed(4)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    model.fit(data, epochs=2, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize("policy", ["each", "whole"])
@pytest.mark.parametrize("name", MODELS)
def test_the_second_pass_does_what_the_first_did(name, policy):
    once = trained(MODELS[name], lambda model: None, jit_compile=False)
    twice = trained(
        MODELS[name], lambda model: tfdp.remat(model, policy), jit_compile=False
    )
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
    ],
)
def test_what_would_be_another_function_is_refused(layer, message):
    with pytest.raises((ConfigurationError, ValueError), match=message):
        trained(lambda: dense_model(layer()), tfdp.remat, jit_compile=False)
