"""Sequence to sequence with attention, teacher forcing, and masks of padded words."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

WORDS, LENGTH, WIDTH, START = 40, 9, 32, 1


def make_pairs(count, seed=0):
    """Draws sentences; a translation is the sentence backwards, with other words."""
    rng = np.random.default_rng(seed)
    source = np.zeros((count, LENGTH), "int32")
    target = np.zeros((count, LENGTH + 1), "int32")
    for i, length in enumerate(rng.integers(3, LENGTH + 1, count)):
        words = rng.integers(2, WORDS, length)
        source[i, :length] = words
        target[i, 0] = START
        target[i, 1 : length + 1] = (words[::-1] * 7) % (WORDS - 2) + 2
    return source, target


def to_example(source, target):
    inputs = {"source": source, "decoder": target[:-1]}
    return inputs, target[1:]


def build_model():
    source = keras.Input((None,), dtype="int32", name="source")
    decoder = keras.Input((None,), dtype="int32", name="decoder")
    x = layers.Embedding(WORDS, WIDTH, mask_zero=True)(source)
    encoded, forward, backward = layers.Bidirectional(
        layers.GRU(WIDTH // 2, return_sequences=True, return_state=True)
    )(x)
    state = layers.Concatenate()([forward, backward])
    y = layers.Embedding(WORDS, WIDTH, mask_zero=True)(decoder)
    y = layers.GRU(WIDTH, return_sequences=True, dropout=0.1)(y, initial_state=state)
    context = layers.Attention(use_scale=True)([y, encoded])
    y = layers.Concatenate()([y, context])
    y = layers.Dense(WIDTH, activation="tanh")(y)
    outputs = layers.Dense(WORDS)(y)
    return keras.Model([source, decoder], outputs, name="translator")


pairs = tf.data.Dataset.from_tensor_slices(make_pairs(256))
train = pairs.take(224).map(to_example).batch(32).prefetch(tf.data.AUTOTUNE)
valid = pairs.skip(224).map(to_example).batch(32)

model = build_model()
model.compile(
    optimizer=keras.optimizers.RMSprop(1e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0),
    metrics=["accuracy"],
    weighted_metrics=["accuracy"],
)
model.fit(train, validation_data=valid, epochs=2)
