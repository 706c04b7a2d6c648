"""The order in which `fit` reads shuffled arrays, epoch by epoch.

python -m tests.support.array_orders SEED   a worker of several hosts; no seed: none
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdp

ROWS = 13  # no multiple of the batch, nor of the replicas


class Noting(keras.Model):
    """Notes the rows that it is called with, and learns nothing of their order."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen = []

    def call(self, x):
        if not isinstance(x, keras.KerasTensor):
            note = self.seen.append
            tf.numpy_function(lambda rows: note(rows[:, 0].astype(int)), [x], [])
        return self.dense(x)


def made(strategy):
    with strategy.scope():
        model = Noting()
        model.compile("sgd", "mse")
    return model


class Epochs(keras.callbacks.Callback):
    """The rows of each epoch, each batch sorted: replicas note theirs in any order."""

    def __init__(self):
        super().__init__()
        self.orders = []

    def on_epoch_begin(self, epoch, logs=None):
        self.orders.append([])
        self.model.seen.clear()

    def on_train_batch_end(self, batch, logs=None):
        seen = self.model.seen
        self.orders[-1].append(sorted({int(n) for part in seen for n in part}))
        seen.clear()


def orders_of(model, *callbacks, epochs=3, batch=4, **options):
    """The rows of each batch of each epoch."""
    x = np.arange(ROWS, dtype="float32").reshape(-1, 1)
    noted = Epochs()
    options = {"epochs": epochs, "batch_size": batch, "verbose": 0, **options}
    model.fit(x, x, callbacks=[noted, *callbacks], **options)
    return noted.orders


if __name__ == "__main__":
    if sys.argv[1:]:
        keras.utils.set_random_seed(int(sys.argv[1]))
    worker = made(tfdp.MultiHostDataParallelStrategy())
    # The last batch, of one row, leaves a worker without: it computes on another's.
    print("ORDERS", json.dumps([e[:-1] for e in orders_of(worker)]), flush=True)
