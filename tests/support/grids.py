"""Meshes of logical CPUs, models and layouts for tests of `layout=`."""

import math

import keras
import numpy as np
import tensorflow as tf

import tfdp

layers = keras.layers
VOCABULARY, WORDS, WIDTH, HEADS, HIDDEN = 32, 6, 8, 2, 16


def mesh_of(shape, names=("data", "model")):
    devices = [f"cpu:{rank}" for rank in range(math.prod(shape))]
    return keras.distribution.DeviceMesh(shape, list(names), devices)


def layout_of(shape, rules):
    """Keras' `LayoutMap` of a mesh, from the axes by rule."""
    layout = keras.distribution.LayoutMap(mesh_of(shape))
    for rule, axes in rules.items():
        layout[rule] = axes
    return layout


def grid(shape, rules, **options):
    return tfdp.DataParallelStrategy(layout=layout_of(shape, rules), **options)


def mlp():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((12,))
    hidden = layers.Dense(HIDDEN, "gelu", name="up")(inputs)
    hidden = layers.Dense(12, name="down")(hidden)
    return keras.Model(inputs, layers.Dense(5, name="head")(hidden))


MLP_RULES = {
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": ("model", None),
}


def rows_of(rows=45, seed=0):
    """Rows of very different size, so that no two replicas have alike gradients."""
    drawn = np.random.default_rng(seed)
    x = drawn.normal(size=(rows, 12)) * drawn.uniform(0.2, 3.0, size=(rows, 1))
    return x.astype("float32"), drawn.integers(0, 5, rows)


def trained(strategy, build=mlp, optimizer=None, data=None, batch=12, epochs=2):
    """Fits `build()` under `strategy` (None: one device); the model and its losses."""
    x, y = data if data is not None else rows_of()
    with (strategy or tf.distribute.get_strategy()).scope():
        model = build()
        model.compile(
            optimizer() if optimizer else keras.optimizers.SGD(0.1, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
    fitted = model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0)
    return model, fitted.history["loss"]


def blocks_of(variable):
    """What each replica stores of a weight: blocks, or copies of the whole."""
    return [value.numpy() for value in variable.value.values]
