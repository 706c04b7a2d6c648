"""A worker that takes a step with losses of the rows of all hosts.

Arguments: the file to write, and `LOSS:ROWS` for each step.
"""

import contextlib
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.support.in_batch_losses import LOSSES, VIEW


def root_of_mean(y, p):
    """A metric of the whole batch."""
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(p)))


def step(strategy, name, rows):
    """The gradients of a step on a batch, a layer's state, and the reported numbers."""
    draw = np.random.default_rng(5)
    x = draw.normal(size=(rows, 6)) * draw.uniform(0.3, 2.0, size=(rows, 1))
    y, weights = draw.integers(0, 3, rows), draw.uniform(0.1, 2.0, rows)
    with strategy.scope() if strategy else contextlib.nullcontext():
        keras.utils.set_random_seed(3)
        normalization = keras.layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(10, "tanh", kernel_regularizer="l2"),
                tfdp.layers.AllRows(normalization),
                keras.layers.Dense(2 * VIEW),
            ]
        )
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        loss, metrics = LOSSES[name], [root_of_mean]
        model.compile(optimizer, loss, metrics=metrics, jit_compile=False)
    tfdp.losses.on_all_rows(model)
    parts = (x, y, weights) if name == "InfoNCE" else (x, y)
    data = tf.data.Dataset.from_tensor_slices(parts).batch(rows)
    logs = model.fit(data, verbose=0).history
    found = [-np.asarray(v).ravel() / 0.1 for v in optimizer.momentums]
    state = [np.ravel(v) for v in model.non_trainable_variables]
    numbers = [logs["loss"][0], logs["root_of_mean"][0]]
    return np.concatenate(found), np.concatenate([*state, numbers])


def steps(strategy, wanted):
    found = {}
    for one in wanted:
        name, rows = one.split(":")
        gradients, numbers = step(strategy, name, int(rows))
        found[f"{one} gradients"], found[f"{one} numbers"] = gradients, numbers
    return found


if __name__ == "__main__":
    worker = tfdp.auto_strategy()
    results = steps(worker, sys.argv[2:])
    np.savez(f"{sys.argv[1]}.{worker.cluster.rank}.npz", **results)
