"""Compares a step's GPU memory with the prediction of `tfdp plan`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp import DataParallelStrategy
from tfdp.planning import plan
from tfdp.strategies.in_words import without_fit_message

ROWS, STEPS = 256, 3


def measure_memory(strategy: DataParallelStrategy) -> str:
    """Reads a step's peak memory on one GPU from TensorFlow's allocator."""
    build = functools.partial(build_large, "GPU")
    with without_fit_message():
        with strategy.scope():
            model = build()
        batch = make_batch(model, ROWS)
        # Excludes one-time allocations, such as for autotuning kernels.
        model.fit(batch, steps_per_epoch=STEPS, verbose=0, shuffle=False)
        tf.config.experimental.reset_memory_stats("GPU:0")
        model.fit(batch, steps_per_epoch=STEPS, verbose=0, shuffle=False)
    peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    return f"peak {peak / 1e6:.1f} MB, planned {_planned(build)}"


def _planned(build: Callable[[], keras.Model]) -> str:
    try:
        return f"{plan(build, ROWS).peak_bytes / 1e6:.1f} MB"
    except Exception as error:  # the measurement matters more than the plan
        return f"nothing ({type(error).__name__}: {error})"


# The networks to time and to measure.


CLASSES = 10
SMALL_INPUTS, SMALL_WIDTH, SMALL_LAYERS = 256, 256, 8
# A GPU finishes a small image before the next kernel can start.
SIDE = {"CPU": 16, "GPU": 64}
WIDTHS = {"CPU": (16, 32), "GPU": (64, 128, 256)}


def build_small() -> keras.Model:
    """Eight dense layers: most of a step is overhead of Python and TensorFlow."""
    inputs = keras.Input((SMALL_INPUTS,))
    x = inputs
    for _ in range(SMALL_LAYERS):
        x = keras.layers.Dense(SMALL_WIDTH, activation="relu")(x)
    return _compiled(inputs, x)


def build_large(device_type: str) -> keras.Model:
    """Convolutions with batch normalization; `device_type` is "CPU" or "GPU"."""
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
    # "auto" would compile only in plain Keras.
    model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=False)
    return model


def make_batch(model: keras.Model, rows: int) -> tf.data.Dataset:
    """An endless dataset that repeats one batch."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, *model.input_shape[1:])).astype("float32")
    y = rng.integers(0, CLASSES, size=(rows,))
    return tf.data.Dataset.from_tensors((x, y)).cache().repeat()
