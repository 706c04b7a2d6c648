"""Speech by CTC: spectrograms of unequal length, padded, and unequal labels."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

LETTERS, BINS = 12, 16


def examples(count=128, seed=0):
    """Draws spoken words: each letter is a tone for some frames."""
    rng = np.random.default_rng(seed)
    tones = rng.normal(size=(LETTERS, BINS))
    for _ in range(count):
        word = rng.integers(1, LETTERS, rng.integers(2, 6))
        frames = np.repeat(tones[word], rng.integers(4, 7, len(word)), axis=0)
        frames = frames + rng.normal(0, 0.3, frames.shape)
        yield frames.astype("float32"), word.astype("int32")


dataset = tf.data.Dataset.from_generator(
    examples,
    output_signature=(
        tf.TensorSpec((None, BINS), tf.float32),
        tf.TensorSpec((None,), tf.int32),
    ),
)
dataset = dataset.padded_batch(16, padded_shapes=([32, BINS], [6]))


def build_model():
    inputs = keras.Input((None, BINS), name="spectrogram")
    x = layers.Conv1D(32, 5, padding="same", use_bias=False)(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.ReLU()(x)
    x = layers.Bidirectional(layers.GRU(16, return_sequences=True))(x)
    x = layers.Dropout(0.2)(x)
    return keras.Model(inputs, layers.Dense(LETTERS + 1)(x), name="deep_speech")


model = build_model()
model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=keras.losses.CTC())
model.fit(dataset, epochs=2)
