"""Models of branches that are alike in all shapes but for the rows of the batch.

    python -m tests.support.branches FILE KIND...

Under TFDP_* variables each worker, with the weights in shards, trains a model of two
branches of each KIND on its rows of each batch (`ROWS_OF_HOSTS`), and writes the
weights to FILE.KIND.rank.npz.
"""

import os
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.support.parity import classification_data

L = keras.layers
# By batch, those of each host: where it has two replicas, both of a host have one row.
ROWS_OF_HOSTS = ((2, 4), (4, 2), (2, 5))


class Centred(L.Layer):
    """Subtracts the mean over the rows of all replicas: an `all_reduce` of its own."""

    def call(self, inputs):
        total, rows = (
            tf.reduce_sum(inputs, axis=0),
            tf.cast(tf.shape(inputs)[0], tf.float32),
        )
        context = tf.distribute.get_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            total, rows = context.all_reduce("SUM", [total, rows])
        return inputs - total / rows


def branch(kind, x):
    if kind == "image":
        x = L.Flatten()(
            L.SeparableConv2D(2, 2, padding="same")(L.Reshape((3, 4, 1))(x))
        )
        return L.Dense(6)(x)
    x = L.Dense(6, "tanh")(L.Dense(6)(x))
    if kind == "sync":
        return tfdp.layers.SyncBatchNormalization(epsilon=0.1)(x)
    if kind == "centred":
        return Centred()(x)
    return x


def branching_model(strategy, kinds, **options):
    """A compiled model of one branch of each kind; strategy None: one device."""
    with (strategy or tf.distribute.get_strategy()).scope():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((12,))
        joined = L.Add()([branch(kind, inputs) for kind in kinds])
        model = keras.Model(inputs, L.Dense(5)(joined))
        model.compile(
            keras.optimizers.SGD(0.1),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
            **options,
        )
    return model


def trained_on_hosts(strategy, kind, rank=None):
    """First and last weights; rank None: of one device, on the rows of all hosts."""
    x, y = classification_data(samples=sum(map(sum, ROWS_OF_HOSTS)))
    model = branching_model(strategy, (kind, kind))
    first, begin = model.get_weights(), 0
    for rows in ROWS_OF_HOSTS:
        ends = begin + np.cumsum([0, *rows])
        begin, own = ends[-1], ends if rank is None else ends[rank : rank + 2]
        model.train_on_batch(x[own[0] : own[-1]], y[own[0] : own[-1]])
    return first, model.get_weights()


def main(file, *kinds):
    strategy = tfdp.MultiHostDataParallelStrategy(shard="parameters", shard_min_bytes=0)
    rank = strategy.cluster.rank
    for kind in kinds:
        np.savez(
            f"{file}.{kind}.{rank}.npz", *trained_on_hosts(strategy, kind, rank)[1]
        )


if __name__ == "__main__":
    os.environ.setdefault("TFDP_DEVICES_PER_WORKER", "2")
    main(*sys.argv[1:])
