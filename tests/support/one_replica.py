"""Models for one replica and for plain Keras, and the operations that a step runs.

`python -m tests.support.one_replica NAME` counts them, in a process of its own: what
other tests of a process have trained changes what TensorFlow's optimizer makes of a
graph.
"""

import collections
import contextlib
import json
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.support.run_graphs import run_graphs

ROWS, BATCH, CLASSES = 19, 8, 3  # the last batch has three rows


def _network():
    """Moving statistics, random numbers, a penalty, and slots of an optimizer."""
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Conv2D(4, 3, use_bias=False)(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dropout(0.3)(keras.layers.Flatten()(x))
    penalty = keras.regularizers.L2(1e-2)
    return keras.Model(
        inputs, keras.layers.Dense(CLASSES, kernel_regularizer=penalty)(x)
    )


def _transformer():
    """Attention, whose dropout draws as well, and embeddings."""
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(20, 8)(inputs)
    y = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.MultiHeadAttention(2, 4, dropout=0.2)(y, y)
    x = x + keras.layers.Dense(8)(x)  # TensorFlow loses the shape of its gradient
    x = keras.layers.Dropout(0.3)(keras.layers.Flatten()(x))
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(x))


NETWORKS = {"network": _network, "transformer": _transformer}


def _trainee(name, scope):
    keras.utils.set_random_seed(7)
    with scope:
        model = NETWORKS[name]()
        model.compile(
            keras.optimizers.AdamW(1e-2, clipnorm=0.5),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return model


def both(name):
    one = tfdp.DataParallelStrategy(["CPU:0"], alone=True)
    yield _trainee(name, contextlib.nullcontext())
    yield _trainee(name, one.scope())


def rows_of(model):
    generator = np.random.default_rng(3)
    shape = (ROWS, *model.inputs[0].shape[1:])
    whole = model.inputs[0].dtype == "int32"
    x = generator.integers(20, size=shape) if whole else generator.normal(size=shape)
    return x.astype(model.inputs[0].dtype), generator.integers(CLASSES, size=ROWS)


def operations_of(model):
    """By type, in the largest graph that TensorFlow's optimizer leaves to be run."""
    x, y = rows_of(model)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()
    graphs = run_graphs(lambda: model.fit(batches, steps_per_epoch=2, verbose=0))
    operations = ([node.op for node in graph.node] for graph in graphs)
    return collections.Counter(max(operations, key=len))


if __name__ == "__main__":
    print(json.dumps([operations_of(model) for model in both(sys.argv[1])]))
