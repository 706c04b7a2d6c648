"""A training in which one worker fails; it prints when that was.

python -m tests.support.lost_worker HOW SILENCE_SECONDS TIMEOUT_SECONDS
"""

import os
import signal
import sys
import time

import keras

import tfdp
from tests.support.parity import classification_data, dense_model

FAILING_WORKER = 1


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


def main():
    strategy = tfdp.MultiHostDataParallelStrategy(
        communication=tfdp.Communication(
            silence_seconds=float(sys.argv[2]), timeout_seconds=float(sys.argv[3])
        )
    )
    with strategy.scope():
        model = dense_model()
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    x, y = classification_data(96)
    callbacks = [Fail()] if strategy.cluster.rank == FAILING_WORKER else []
    try:
        model.fit(x, y, batch_size=12, epochs=50, verbose=0, callbacks=callbacks)
    finally:
        print(f"ended at {time.time()}", flush=True)


if __name__ == "__main__":
    main()
