"""Models in stages of a pipeline, and the same on one device."""

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.support.parity import classification_data

layers = keras.layers
FEATURES, CLASSES, WORDS, VOCABULARY = 12, 5, 6, 20
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy


def mlp():
    hidden = [layers.Dense(16, "tanh", name=f"hidden_{n}") for n in range(3)]
    return keras.Sequential(
        [keras.Input((FEATURES,)), *hidden, layers.Dense(CLASSES, name="head")]
    )


def branched():
    """Two inputs, two outputs, and connections that cross each cut."""
    first, second = keras.Input((FEATURES,)), keras.Input((FEATURES,))
    one = layers.Dense(16, "gelu")(first)
    two = layers.Dense(16, "gelu")(second)
    hidden = layers.Add()([one, layers.Dense(16, "tanh")(two)])
    hidden = layers.LayerNormalization()(hidden)
    hidden = layers.Dense(16, "tanh")(layers.Concatenate()([hidden, two]))
    last = layers.Dense(CLASSES)(layers.Add()([hidden, one]))
    return keras.Model([first, second], [last, layers.Dense(CLASSES)(two)])


def normalized():
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(16, "tanh"),
            layers.BatchNormalization(momentum=0.5),
            layers.Dropout(0.3, seed=5),
            layers.Dense(16, "tanh"),
            layers.BatchNormalization(momentum=0.5),
            layers.Dense(CLASSES),
        ]
    )


def penalized():
    """Losses of layers: of activations, and of weights."""
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(16, "tanh", kernel_regularizer="l2"),
            layers.Dense(16, "tanh", activity_regularizer="l2"),
            layers.Dense(16, "tanh", kernel_regularizer="l2"),
            layers.ActivityRegularization(l2=0.1),
            layers.Dense(CLASSES),
        ]
    )


def attentive(tied=False):
    """Words with a mask, two blocks of attention; `tied`: the words' table ends it."""
    words = keras.Input((WORDS,), dtype="int32")
    if tied:
        table = layers.ReversibleEmbedding(VOCABULARY, 8, mask_zero=True)
    else:
        table = layers.Embedding(VOCABULARY, 8, mask_zero=True)
    hidden = table(words)
    for _ in range(2):
        attended = layers.MultiHeadAttention(2, 4)(hidden, hidden)
        hidden = layers.LayerNormalization()(layers.Add()([hidden, attended]))
        hidden = layers.Add()([hidden, layers.Dense(8, "gelu")(hidden)])
    last = table(hidden, reverse=True) if tied else layers.Dense(VOCABULARY)(hidden)
    return keras.Model(words, last)


def frozen():
    model = mlp()
    model.layers[0].trainable = False
    return model


def tied():
    return attentive(tied=True)


def recurrent():
    words = keras.Input((WORDS,), dtype="int32")
    hidden = layers.Embedding(VOCABULARY, 8, mask_zero=True)(words)
    hidden = layers.LSTM(8, return_sequences=True)(hidden)
    hidden = layers.GRU(8)(hidden)
    return keras.Model(words, layers.Dense(CLASSES)(hidden))


def convolved():
    """A kernel that is shared by two calls, in two stages."""
    shared = layers.Conv1D(4, 3, padding="same", activation="tanh")
    inputs = keras.Input((FEATURES,))
    hidden = layers.Reshape((3, 4))(inputs)
    hidden = layers.Conv1D(4, 3, padding="same", activation="tanh")(shared(hidden))
    hidden = shared(layers.Conv1D(4, 2, padding="same")(hidden))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.Flatten()(hidden)))


def rows_of(build, rows=44):
    """Rows of very different size, so that no two replicas have alike gradients."""
    x, y = classification_data(rows, FEATURES, CLASSES)
    drawn = np.random.default_rng(1)
    if build is branched:
        return [x, x[::-1] * 0.5], [y, y[::-1].copy()]
    if build in (attentive, tied, recurrent):
        words = drawn.integers(1, VOCABULARY, (rows, WORDS))
        for row, length in enumerate(drawn.integers(1, WORDS + 1, rows)):
            words[row, length:] = 0
        x = words.astype("int32")
        return x, (y if build is recurrent else np.roll(words, -1, axis=1))
    return x, y


def strategy_of(replicas, **options):
    return tfdp.DataParallelStrategy(
        [f"CPU:{rank}" for rank in range(replicas)], **options
    )


def made(build, strategy=None, optimizer=None, change=None, **compiled):
    """`build()` under `strategy` (None: one device), compiled; `change`: of a model."""
    keras.utils.set_random_seed(3)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = build()
        if change is not None:
            model = change(model)
        given = {"loss": CROSS_ENTROPY(from_logits=True), "jit_compile": False}
        optimizer = optimizer or (lambda: keras.optimizers.SGD(0.05, momentum=0.9))
        model.compile(optimizer(), **{**given, **compiled})
    return model


def trained(build, strategy=None, data=None, epochs=2, batch=12, **given):
    """A fitted model, and the losses of its epochs."""
    model = made(build, strategy, **given)
    x, y = data if data is not None else rows_of(build)
    how = {"batch_size": batch, "epochs": epochs, "shuffle": False, "verbose": 0}
    return model, model.fit(x, y, **how).history["loss"]


def bytes_at(model, state=True):
    """The bytes that each replica stores of weights, and of the optimizer's state."""
    variables = [*model.trainable_variables]
    if state:
        variables += [v for v in model.optimizer.variables if len(v.shape)]
    values = [variable.value.values for variable in variables]
    return [
        sum(own[rank].numpy().nbytes for own in values)
        for rank in range(len(values[0]))
    ]
