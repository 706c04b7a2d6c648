"""The networks whose steps are timed, and whose memory is read."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

__all__ = ["CLASSES", "build_large", "build_small", "make_batch"]

CLASSES = 10
SMALL_INPUTS, SMALL_WIDTH, SMALL_LAYERS = 256, 256, 8
# A GPU has done with a small picture before the next kernel can start.
SIDE = {"CPU": 16, "GPU": 64}
WIDTHS = {"CPU": (16, 32), "GPU": (64, 128, 256)}


def build_small() -> keras.Model:
    """Eight dense layers: a step is mostly what Python and TensorFlow add to it."""
    inputs = keras.Input((SMALL_INPUTS,))
    x = inputs
    for _ in range(SMALL_LAYERS):
        x = keras.layers.Dense(SMALL_WIDTH, activation="relu")(x)
    return _compiled(inputs, x)


def build_large(device_type: str) -> keras.Model:
    """Convolutions with batch normalization, as large as suits the device.

    Args:
      device_type: "CPU" or "GPU".
    """
    inputs = keras.Input((SIDE[device_type], SIDE[device_type], 3))
    x = inputs
    for width in WIDTHS[device_type]:
        for _ in range(2):
            x = keras.layers.Conv2D(width, 3, padding="same", use_bias=False)(x)
            x = keras.layers.BatchNormalization()(x)
            x = keras.layers.ReLU()(x)
        x = keras.layers.MaxPooling2D()(x)
    return _compiled(inputs, keras.layers.GlobalAveragePooling2D()(x))


def _compiled(inputs: Any, x: Any) -> keras.Model:
    model = keras.Model(inputs, keras.layers.Dense(CLASSES)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # "auto" would compile in plain Keras alone.
    model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=False)
    return model


def make_batch(model: keras.Model, rows: int) -> tf.data.Dataset:
    """One batch for the model, again and again."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, *model.input_shape[1:])).astype("float32")
    y = rng.integers(0, CLASSES, size=(rows,))
    return tf.data.Dataset.from_tensors((x, y)).cache().repeat()
