"""A training with `callbacks.Stragglers` on several workers, one of which is slow.

    python -m tests.support.straggler_workers SLOW FOLDER

The input of worker SLOW sleeps. Prints, in lines of JSON, what the worker was told, and
whether the weights are those of a training without the callback.
"""

import hashlib
import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.support.parity import classification_data, dense_model

OF_FEATURE = ("chain.step_times", "callbacks.stragglers", "plan.stragglers")
BATCH, STEPS, EPOCHS = 12, 24, 2
SLEEPS_SECONDS = 0.1


def make_model(strategy, accumulate_steps=None):
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = dense_model()
        model.compile(
            keras.optimizers.Adam(0.01, gradient_accumulation_steps=accumulate_steps),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=3 if accumulate_steps else 1,
            jit_compile=False,
        )
    return model


def dataset(sleeps_seconds):
    # The last batch of an epoch has half of the rows.
    x, y = classification_data(BATCH * STEPS - BATCH // 2)

    def wait(rows):
        time.sleep(sleeps_seconds)
        return rows

    def waits(rows, labels):
        waited = tf.numpy_function(wait, [rows], tf.float32)
        return tf.ensure_shape(waited, rows.shape), labels

    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).map(waits)


def weights_after(model, sleeps_seconds, callbacks, **options):
    history = model.fit(
        dataset(sleeps_seconds),
        epochs=EPOCHS,
        verbose=0,
        callbacks=callbacks,
        **options,
    )
    blobs = [np.asarray(weight).tobytes() for weight in model.get_weights()]
    return hashlib.sha256(b"".join(blobs)).hexdigest(), history.history


def main(slow, folder):
    strategy = tfdp.MultiHostDataParallelStrategy(
        communication=tfdp.Communication(engine="sockets")
    )
    rank = strategy.cluster.rank
    plain, _ = weights_after(make_model(strategy), 0.0, [])
    imported = [name for name in OF_FEATURE if f"tfdp.{name}" in sys.modules]
    stragglers = tfdp.callbacks.Stragglers(report_every=8)
    callbacks = [tfdp.callbacks.RunRecord(folder), stragglers]
    sleeps = SLEEPS_SECONDS if rank == int(slow) else 0.0
    watched, history = weights_after(make_model(strategy), sleeps, callbacks)
    told = {
        "imported": imported,
        "same": plain == watched,
        "found": [[one.worker, one.cause, one.step] for one in stragglers.found],
        "lost_seconds": [one.lost_seconds for one in stragglers.found],
        "logs": {n: v for n, v in history.items() if n.startswith("straggler")},
    }
    # Updates of each fourth batch, and three steps in an execution.
    plain, _ = weights_after(make_model(strategy, 4), 0.0, [])
    again = tfdp.callbacks.Stragglers(report_every=8)
    model = make_model(strategy, 4)
    watched, _ = weights_after(model, sleeps, [again], steps_per_epoch=STEPS)
    told["accumulated"] = [[one.worker, one.cause, one.step] for one in again.found]
    told["same_accumulated"] = plain == watched
    print("told", json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
