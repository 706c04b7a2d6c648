"""The inputs and layers of a program, by name.

Adding a layer is adding a line. A layer says what it takes and gives: "vector" (rows,
size), "sequence" (rows, TIMES, size) or "image" (rows, SIDE, SIDE, channels).
"""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np

import tfdp

L = keras.layers

FEATURES, TIMES, WORDS, SIDE, CHANNELS, WIDTH = 5, 4, 7, 6, 2, 6


@dataclasses.dataclass(frozen=True)
class Layer:
    """A row of the table.

    Args:
      takes, gives: see the module.
      make: called once when the model is built; gives a function of a tensor.
    """

    takes: str
    gives: str
    make: Callable


class ScaledActivity(L.Layer):
    """Adds the sum over its rows to the loss, and says so: else it is a mean's part."""

    def call(self, inputs):
        total = keras.ops.sum(keras.ops.square(inputs))
        self.add_loss(tfdp.losses.local_sum(1e-2 * total))
        return inputs


class MeanActivity(L.Layer):
    """Adds the mean over its rows to the loss, and says so."""

    def call(self, inputs):
        mean = keras.ops.mean(keras.ops.square(inputs))
        self.add_loss(tfdp.losses.local_mean(0.1 * mean))
        return inputs


class Gate(L.Layer):
    """A layer with a weight of its own, made in `build`."""

    def build(self, shape):
        self.gate = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, inputs):
        return inputs * keras.ops.sigmoid(self.gate)


def residual():
    dense = [L.Dense(WIDTH, "tanh"), L.Dense(WIDTH), L.Add()]
    return lambda x: dense[2]([y := dense[0](x), dense[1](y)])


def fork():
    left, right, join = L.Dense(4, "tanh"), L.Dense(3), L.Concatenate()
    return lambda x: join([left(x), right(x)])


def shared():
    first, dense = L.Dense(WIDTH), L.Dense(WIDTH, "tanh")
    return lambda x: dense(dense(first(x)))


def multiplied():
    left, right, join = L.Dense(WIDTH, "tanh"), L.Dense(WIDTH), L.Multiply()
    return lambda x: join([left(x), right(x)])


def attention():
    layer = L.MultiHeadAttention(2, 3)
    return lambda x: layer(x, x)


def dot_attention():
    layer, query = L.Attention(), L.Dense(WIDTH)
    value = L.Dense(WIDTH)
    return lambda x: layer([query(x), value(x)])


def stateful_sum(layer):
    return lambda: layer


def frozen():
    layer = L.Dense(WIDTH, "tanh")
    layer.trainable = False
    return layer


LAYERS = {
    # vector -> vector
    "dense": Layer("vector", "vector", lambda: L.Dense(WIDTH)),
    "dense-tanh": Layer("vector", "vector", lambda: L.Dense(WIDTH, "tanh")),
    "dense-gelu": Layer("vector", "vector", lambda: L.Dense(WIDTH, "gelu")),
    "dense-no-bias": Layer("vector", "vector", lambda: L.Dense(WIDTH, use_bias=False)),
    "dense-l2": Layer(
        "vector",
        "vector",
        lambda: L.Dense(WIDTH, "tanh", kernel_regularizer=keras.regularizers.L2(0.1)),
    ),
    "dense-unit-norm": Layer(
        "vector",
        "vector",
        lambda: L.Dense(WIDTH, kernel_constraint=keras.constraints.UnitNorm()),
    ),
    "dense-frozen": Layer("vector", "vector", frozen),
    "layer-norm": Layer("vector", "vector", L.LayerNormalization),
    "rms-norm": Layer("vector", "vector", L.RMSNormalization),
    "sync-batch-norm": Layer("vector", "vector", tfdp.layers.SyncBatchNormalization),
    "prelu": Layer("vector", "vector", L.PReLU),
    "rescaling": Layer("vector", "vector", lambda: L.Rescaling(0.5, 0.1)),
    "gate": Layer("vector", "vector", Gate),
    "residual": Layer("vector", "vector", residual),
    "fork": Layer("vector", "vector", fork),
    "shared": Layer("vector", "vector", shared),
    "multiplied": Layer("vector", "vector", multiplied),
    "dropout": Layer("vector", "vector", lambda: L.Dropout(0.4, seed=5)),
    "gaussian-noise": Layer("vector", "vector", lambda: L.GaussianNoise(0.3, seed=5)),
    "add-loss-sum": Layer("vector", "vector", ScaledActivity),
    "add-loss-local-mean": Layer("vector", "vector", MeanActivity),
    "activity-l2": Layer(
        "vector",
        "vector",
        lambda: L.Dense(WIDTH, activity_regularizer=keras.regularizers.L2(0.1)),
    ),
    "batch-norm-frozen": Layer(
        "vector", "vector", lambda: L.BatchNormalization(trainable=False)
    ),
    # sequence -> sequence
    "lstm-sequence": Layer(
        "sequence", "sequence", lambda: L.LSTM(4, return_sequences=True)
    ),
    "bidirectional": Layer(
        "sequence",
        "sequence",
        lambda: L.Bidirectional(L.GRU(3, return_sequences=True)),
    ),
    "conv1d": Layer("sequence", "sequence", lambda: L.Conv1D(4, 2, padding="causal")),
    "time-dense": Layer(
        "sequence", "sequence", lambda: L.TimeDistributed(L.Dense(WIDTH, "tanh"))
    ),
    "attention": Layer("sequence", "sequence", attention),
    "dot-attention": Layer("sequence", "sequence", dot_attention),
    "sequence-layer-norm": Layer("sequence", "sequence", L.LayerNormalization),
    "sequence-sync-batch-norm": Layer(
        "sequence", "sequence", tfdp.layers.SyncBatchNormalization
    ),
    "sequence-dropout": Layer(
        "sequence", "sequence", lambda: L.SpatialDropout1D(0.4, seed=6)
    ),
    "masking": Layer("sequence", "sequence", lambda: L.Masking(0.0)),
    # sequence -> vector
    "lstm": Layer("sequence", "vector", lambda: L.LSTM(4)),
    "lstm-recurrent-dropout": Layer(
        "sequence", "vector", lambda: L.LSTM(4, recurrent_dropout=0.3, seed=7)
    ),
    "gru": Layer("sequence", "vector", lambda: L.GRU(4)),
    "gru-unrolled": Layer(
        "sequence", "vector", lambda: L.GRU(4, unroll=True, reset_after=False)
    ),
    "simple-rnn": Layer("sequence", "vector", lambda: L.SimpleRNN(4)),
    "average": Layer("sequence", "vector", L.GlobalAveragePooling1D),
    "maximum": Layer("sequence", "vector", L.GlobalMaxPooling1D),
    "flatten": Layer("sequence", "vector", L.Flatten),
    # image -> image
    "conv": Layer("image", "image", lambda: L.Conv2D(3, 3, activation="relu")),
    "conv-strided": Layer(
        "image", "image", lambda: L.Conv2D(3, 2, strides=2, padding="same")
    ),
    "conv-transposed": Layer(
        "image", "image", lambda: L.Conv2DTranspose(2, 2, strides=2)
    ),
    "depthwise": Layer("image", "image", lambda: L.DepthwiseConv2D(2, padding="same")),
    "separable": Layer("image", "image", lambda: L.SeparableConv2D(3, 2)),
    "max-pool": Layer("image", "image", lambda: L.MaxPooling2D(2, padding="same")),
    "average-pool": Layer(
        "image", "image", lambda: L.AveragePooling2D(2, padding="same")
    ),
    "group-norm": Layer("image", "image", lambda: L.GroupNormalization(groups=-1)),
    "image-sync-batch-norm": Layer(
        "image", "image", tfdp.layers.SyncBatchNormalization
    ),
    "image-flip": Layer("image", "image", lambda: L.RandomFlip(seed=8)),
    "up-sampling": Layer("image", "image", lambda: L.UpSampling2D(2)),
    # image -> vector
    "image-average": Layer("image", "vector", L.GlobalAveragePooling2D),
    "image-flatten": Layer("image", "vector", L.Flatten),
}

# What draws numbers: one device's answer is not that of replicas.
RANDOM = (
    *("dropout", "gaussian-noise", "sequence-dropout", "lstm-recurrent-dropout"),
    "image-flip",
)
NEEDS_LENGTH = ("flatten", "gru-unrolled", "time-dense")
RECURRENT = (
    *("lstm", "lstm-sequence", "bidirectional", "gru", "gru-unrolled", "simple-rnn"),
    "lstm-recurrent-dropout",
)
ADDS_LOSS = ("add-loss-sum", "add-loss-local-mean", "activity-l2")


@dataclasses.dataclass(frozen=True)
class InputKind:
    """A row of the table of inputs.

    Args:
      gives: what the layers behind get.
      make: called when the model is built; a `keras.Input` and a function of it.
      draw: the rows, of a NumPy generator and their number.
      is_ragged: batches of a dataset are as long as their longest row.
    """

    gives: str
    make: Callable
    draw: Callable
    is_ragged: bool = False


def real_rows(*shape):
    """Rows of very different size, so that no two replicas have alike gradients."""

    def draw(rng, rows):
        sizes = rng.uniform(0.2, 2.0, size=(rows, *(1 for _ in shape)))
        return (rng.normal(size=(rows, *shape)) * sizes).astype("float32")

    return draw


def word_rows(rng, rows):
    return rng.integers(1, WORDS, size=(rows, TIMES)).astype("int32")


def padded_words(rng, rows):
    """0 stands for no word: at the end of short rows. No row is empty."""
    lengths = rng.integers(1, TIMES + 1, size=(rows, 1))
    return np.where(np.arange(TIMES) < lengths, word_rows(rng, rows), 0).astype("int32")


def padded_sequences(rng, rows):
    lengths = rng.integers(1, TIMES + 1, size=(rows, 1, 1))
    values = real_rows(TIMES, 3)(rng, rows)
    return np.where(np.arange(TIMES)[:, None] < lengths, values, 0.0).astype("float32")


def whole(shape, dtype=None):
    return lambda: (keras.Input(shape, dtype=dtype), lambda x: x)


def embedded(mask_zero):
    return lambda: (
        keras.Input((TIMES,), dtype="int32"),
        L.Embedding(WORDS, 4, mask_zero=mask_zero),
    )


def ragged():
    return keras.Input((None,), dtype="int32"), L.Embedding(WORDS, 4, mask_zero=True)


def one_word():
    embedding, flat = L.Embedding(WORDS, 4), L.Flatten()
    return keras.Input((1,), dtype="int32"), lambda x: flat(embedding(x))


def masked():
    return keras.Input((TIMES, 3)), L.Masking(0.0)


INPUTS = {
    "vector": InputKind("vector", whole((FEATURES,)), real_rows(FEATURES)),
    "word": InputKind(
        "vector", one_word, lambda rng, rows: rng.integers(0, WORDS, (rows, 1))
    ),
    "sequence": InputKind("sequence", whole((TIMES, 3)), real_rows(TIMES, 3)),
    "masked-sequence": InputKind("sequence", masked, padded_sequences),
    "words": InputKind("sequence", embedded(False), word_rows),
    "masked-words": InputKind("sequence", embedded(True), padded_words),
    "ragged-words": InputKind("sequence", ragged, padded_words, is_ragged=True),
    "image": InputKind(
        "image", whole((SIDE, SIDE, CHANNELS)), real_rows(SIDE, SIDE, CHANNELS)
    ),
}
