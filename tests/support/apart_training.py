"""Hosts that train apart: numbers of every worker, and what it sent in every step.

    python -m tests.support.apart_training FILE NAME...

Under TFDP_* variables every worker trains each scenario and writes FILE.NAME.rank.npz.
"""

import sys

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.support.apart import (
    linear_model,
    regression_data,
    sgd,
    synchronous_slices,
    vector_of,
)
from tfdp.hosts.host_link import CHANNELS

ROWS, BATCH, EPOCHS = 53, 24, 3  # 24, 24 and 5: nine steps

SYNCS = {
    "local": tfdp.sync.LocalSGD(3),
    "post-local": tfdp.sync.LocalSGD(3, start_step=2),
    "diloco": tfdp.sync.DiLoCo(every=4, start_step=1),
    "fragments": tfdp.sync.DiLoCo(every=4, fragments=2, outer_learning_rate=0.4),
    "overlap": tfdp.sync.DiLoCo(every=4, overlap_steps=2, start_step=1),
    "overlap-fragments": tfdp.sync.DiLoCo(
        every=4, fragments=2, overlap_steps=3, mixing=0.25, across="replicas"
    ),
    "diloco-replicas": tfdp.sync.DiLoCo(every=4, across="replicas"),
}


class SentBytes(keras.callbacks.Callback):
    """What this host has sent in each step, and since the one before it in its epoch.

    What travels meanwhile may be handed to the kernel while no step runs. What an epoch
    ends with is sent between epochs, and not counted.
    """

    def __init__(self, link):
        super().__init__()
        self.link, self.counts = link, []

    def _all(self):
        return sum(self.link.sent_bytes(channel) for channel in CHANNELS)

    def on_epoch_begin(self, epoch, logs=None):
        self.before = self._all()

    def on_train_batch_end(self, batch, logs=None):
        now = self._all()
        self.counts.append(now - self.before)
        self.before = now


def local_weights(model, strategy):
    """Of each replica of this host."""
    variables = [v.value for v in model.trainable_variables]
    return [
        vector_of([v.local_copy(place).numpy() for v in variables])
        for place in range(len(strategy.extended.worker_devices))
    ]


def resumed_on_the_way(strategy, path):
    """The local weights of a training, and of one that goes on from a checkpoint.

    It is written after five updates, while what was sent after the fourth travels.
    """
    sync = tfdp.sync.DiLoCo(every=4, overlap_steps=2)
    x, y = regression_data(9 * BATCH)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}

    def made():
        with strategy.scope():
            model = linear_model()
            optimizer = tfdp.DistributedOptimizer(sgd(), sync=sync)
            model.compile(optimizer, "mse", jit_compile=False)
        return model

    model, first, rest = made(), slice(0, 5 * BATCH), slice(5 * BATCH, 9 * BATCH)
    model.fit(x[first], y[first], **options)
    file = tf.train.Checkpoint(model=model).save(f"{path}.{strategy.cluster.rank}")
    model.fit(x[rest], y[rest], **options)
    straight = local_weights(model, strategy)
    other = made()
    # Up to the update in which it is back: what is on its way then is let go.
    other.fit(x[: 5 * BATCH] + 1, y[first], **options)
    tf.train.Checkpoint(model=other).restore(file).assert_existing_objects_matched()
    other.fit(x[rest], y[rest], **options)
    return straight, local_weights(other, strategy)


def main(path, names):
    strategy = tfdp.MultiHostDataParallelStrategy()
    x, y = regression_data(ROWS)
    rank, link = strategy.cluster.rank, strategy.link
    for name in names:
        with strategy.scope():
            model = linear_model()
            optimizer = tfdp.DistributedOptimizer(sgd(), sync=SYNCS[name])
            model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
        sent = SentBytes(link)
        history = model.fit(
            x,
            y,
            batch_size=BATCH,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            callbacks=[sent],
        ).history
        local = local_weights(model, strategy)
        np.savez(
            f"{path}.{name}.{rank}.npz",
            outer=vector_of(model.get_weights()),
            local=local,
            sent=sent.counts,
            losses=history["loss"],
            evaluation=model.evaluate(x, y, batch_size=BATCH, verbose=0),
        )
        print(name, flush=True)
    straight, resumed = resumed_on_the_way(strategy, f"{path}.checkpoint")
    np.savez(f"{path}.resumed.{rank}.npz", straight=straight, resumed=resumed)
    syncs = [None, tfdp.sync.LocalSGD(9, start_step=9)]
    plain, first = synchronous_slices(syncs, strategy)
    np.savez(f"{path}.slices.{rank}.npz", plain=plain, first=first)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
