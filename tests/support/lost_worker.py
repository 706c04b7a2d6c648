"""A training in which one worker fails; it prints when that was.

python -m tests.support.lost_worker HOW SILENCE_SECONDS TIMEOUT_SECONDS [ENGINE [SYNC]]

With the engine "tensorflow" it fails inside of a step, when the others are in a
collective; else between two steps.
"""

import os
import signal
import sys
import time

import keras
import tensorflow as tf

import tfdp
from tests.support.parity import classification_data, dense_model
from tfdp.exchange import over_collectives

FAILING_WORKER = 1
SYNCS = {
    "delayed": tfdp.sync.Delayed(1),
    "bounded": tfdp.sync.BoundedStaleness(2),
    "own pace": tfdp.sync.Asynchronous(),
}


def fail(how):
    print(f"failing at {time.time()}", flush=True)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "raise":
        raise ValueError("the first error")
    elif how == "leave":
        sys.exit(0)
    elif how == "late":
        time.sleep(60)


class Fail(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            fail(sys.argv[1])


class FailInStep:
    def __init__(self, is_failing):
        self.is_failing = is_failing
        self.calls = 0

    def __call__(self, features):
        self.calls += 1
        if self.calls == 4 and self.is_failing:
            # The number of samples crosses by the link meanwhile; who waits afterwards
            # waits in a collective.
            time.sleep(1.0)
            fail(sys.argv[1])
        return features


def failing_in_step(model, is_failing):
    """The same model behind a call of Python."""
    features = keras.Input((12,))
    call = FailInStep(is_failing)
    through = keras.layers.Lambda(
        lambda x: tf.ensure_shape(tf.numpy_function(call, [x], x.dtype), x.shape)
    )
    return keras.Model(features, model(through(features)))


def main():
    engine = sys.argv[4] if len(sys.argv) > 4 else "auto"
    fails_in_step = engine == "tensorflow"
    over_collectives.SMALLEST_BYTES = 0
    strategy = tfdp.MultiHostDataParallelStrategy(
        communication=tfdp.Communication(
            engine=engine,
            silence_seconds=float(sys.argv[2]),
            timeout_seconds=float(sys.argv[3]),
        )
    )
    is_failing = strategy.cluster.rank == FAILING_WORKER
    with strategy.scope():
        model = dense_model()
        if fails_in_step:
            # A call of Python on all of them: the same model everywhere.
            model = failing_in_step(model, is_failing)
        optimizer = keras.optimizers.SGD(0.01)
        if len(sys.argv) > 5:
            sync = SYNCS[sys.argv[5]]
            optimizer = tfdp.DistributedOptimizer(optimizer, sync=sync)
        model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    x, y = classification_data(96)
    callbacks = [Fail()] if is_failing and not fails_in_step else []
    try:
        model.fit(x, y, batch_size=12, epochs=50, verbose=0, callbacks=callbacks)
    finally:
        print(f"ended at {time.time()}", flush=True)


if __name__ == "__main__":
    main()
