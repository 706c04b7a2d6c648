"""What a step takes of a GPU's memory, beside what `tfdp plan` says before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp.planning import plan
from tfdp.strategies.data_parallel import DataParallelStrategy
from tfdp.strategies.in_words import unsaid

ROWS, STEPS = 256, 3


def measure_memory(strategy: DataParallelStrategy) -> str:
    """Reads the peak of some steps from TensorFlow's allocator.

    Args:
      strategy: of one replica, on a GPU.

    Returns:
      The peak, and the plan's.
    """
    build = functools.partial(build_large, "GPU")
    with unsaid():
        with strategy.scope():
            model = build()
        batch = make_batch(model, ROWS)
        # What is allocated once, as for the choice of kernels, does not count.
        model.fit(batch, steps_per_epoch=STEPS, verbose=0, shuffle=False)
        tf.config.experimental.reset_memory_stats("GPU:0")
        model.fit(batch, steps_per_epoch=STEPS, verbose=0, shuffle=False)
    peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    return f"{peak / 1e6:.1f} MB at the most, planned {_planned(build)}"


def _planned(build: Callable[[], keras.Model]) -> str:
    try:
        return f"{plan(build, ROWS).peak_bytes / 1e6:.1f} MB"
    except Exception as error:  # what was measured is worth more than the plan
        return f"nothing ({type(error).__name__}: {error})"


# The networks whose steps are timed, and whose memory is read.


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
