"""Hosts whose updates come late: numbers of every worker, and when it did what.

    python -m tests.support.late_training FOLDER

Under TFDP_* variables every worker trains each scenario, and writes its numbers into
FOLDER/NAME.RANK.npz.
"""

import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.support.apart import linear_model, regression_data, sgd, vector_of
from tfdp.hosts.late_queue import LateQueue

BATCH, ROWS, EPOCHS = 24, 53, 3
STALE_STEPS, STALENESS = 200, 2
# Worker 1 waits before its step WAITS until worker 0 has begun the sum of step AHEAD.
WAITS, AHEAD = 3, 5
LONGEST_WAIT_SECONDS = 600
SAVED_STEP = 100


def compiled(strategy, sync, rate=None):
    with strategy.scope():
        model = linear_model()
        inner = sgd() if rate is None else keras.optimizers.SGD(rate)
        optimizer = tfdp.DistributedOptimizer(inner, sync=sync)
        model.compile(optimizer, "mse", jit_compile=False)
    return model


class Log:
    """When this worker began each sum, ended each step, and after how many updates."""

    def __init__(self, folder, rank):
        self.begun, self.ended, self.updates = [], [], []
        begin, take_due = LateQueue.begin, LateQueue.take_due
        take_oldest = LateQueue.take_oldest

        def noted_begin(queue, places, arrays):
            self.begun.append(time.monotonic())
            if rank == 0 and len(self.begun) - 1 == AHEAD:
                (folder / "ahead").touch()
            begin(queue, places, arrays)

        def noted_due(queue):
            count = take_due(queue)
            self.updates.append(count)
            self.ended.append(time.monotonic())
            return count

        def noted_oldest(queue):  # for a checkpoint, or at the end of the epoch
            count = take_oldest(queue)
            self.updates[-1] += count
            self.ended[-1] = time.monotonic()
            return count

        self.before = begin, take_due, take_oldest
        self._set(noted_begin, noted_due, noted_oldest)

    def close(self):
        self._set(*self.before)

    def _set(self, begin, take_due, take_oldest):
        LateQueue.begin, LateQueue.take_due = begin, take_due
        LateQueue.take_oldest = take_oldest


def stale(strategy, folder):
    """Training under random delays, one of them until the other worker is ahead."""
    rank = strategy.cluster.rank
    model = compiled(strategy, tfdp.sync.BoundedStaleness(STALENESS), rate=0.01)
    x, y = regression_data(4 * STALE_STEPS)
    log, random = Log(folder, rank), np.random.default_rng(rank)

    def delay(batch, logs=None):
        if rank == 1 and batch == WAITS:
            until = time.monotonic() + LONGEST_WAIT_SECONDS
            while not (folder / "ahead").exists() and time.monotonic() < until:
                time.sleep(0.01)
        elif batch > AHEAD and random.random() < 0.1:
            time.sleep(random.exponential(0.02))

    delays = keras.callbacks.LambdaCallback(on_train_batch_begin=delay)
    saves = tfdp.callbacks.Checkpoint(
        folder / "stale", every_steps=SAVED_STEP, every_epochs=None
    )
    options = {"batch_size": 4, "shuffle": False, "verbose": 0}
    model.fit(x, y, callbacks=[delays, saves], **options)
    log.close()
    return {
        "begun": log.begun,
        "ended": log.ended,
        "updates": log.updates,
        "weights": vector_of(model.get_weights()),
    }


def delayed(strategy, sync):
    x, y = regression_data(ROWS)
    model = compiled(strategy, sync)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    losses = model.fit(x, y, epochs=EPOCHS, validation_data=(x, y), **options).history
    return {
        "weights": vector_of(model.get_weights()),
        "validation": losses["val_loss"],
    }


def resumed(strategy, path):
    """The weights of a training, and of one that goes on from its checkpoint, which was
    written with two sums in flight."""
    x, y = regression_data(9 * BATCH)
    rank, batches = strategy.cluster.rank, []
    for start in range(0, len(x), BATCH):
        own = slice(start + rank * BATCH // 2, start + (rank + 1) * BATCH // 2)
        batches.append((x[own], y[own]))

    def step(model, numbers):
        for number in numbers:
            model.train_on_batch(*batches[number])

    sync = tfdp.sync.Delayed(2)
    model, other = compiled(strategy, sync), compiled(strategy, sync)
    step(model, range(5))
    file = tf.train.Checkpoint(model=model).save(f"{path}.{rank}")
    step(model, range(5, 9))
    step(other, range(3))
    tf.train.Checkpoint(model=other).restore(file).assert_existing_objects_matched()
    step(other, range(5, 9))
    for one in (model, other):
        one.optimizer.rounds.apply_in_flight()
    straight, again = (vector_of(each.get_weights()) for each in (model, other))
    return {"straight": straight, "again": again}


def main(folder):
    strategy = tfdp.MultiHostDataParallelStrategy()
    folder, rank = pathlib.Path(folder), strategy.cluster.rank
    results = {
        "delayed": delayed(strategy, tfdp.sync.Delayed(1)),
        "plain": delayed(strategy, None),
        "zero": delayed(strategy, tfdp.sync.BoundedStaleness(0)),
        "resumed": resumed(strategy, folder / "resumed"),
        "stale": stale(strategy, folder),
    }
    for name, values in results.items():
        np.savez(folder / f"{name}.{rank}.npz", **values)


if __name__ == "__main__":
    main(sys.argv[1])
