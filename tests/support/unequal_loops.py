"""Workers whose loops of steps differ; each prints the error that ends its own.

python -m tests.support.unequal_loops CASE
"""

import os
import sys
import time

import keras
import numpy as np

import tfdp
from tests.support.parity import classification_data, dense_model

RANK = int(os.environ["TFDP_RANK"])
FEWER, MORE = 2, 5
ROWS, BATCH = 96, 12
LATE = {"delayed": tfdp.sync.Delayed(1), "stale": tfdp.sync.BoundedStaleness(2)}


class StopEarly(keras.callbacks.Callback):
    """Ends the training of one worker after `FEWER` batches."""

    def on_train_batch_end(self, batch, logs=None):
        if RANK == 0 and batch + 1 == FEWER:
            self.model.stop_training = True


class OnChief(keras.callbacks.Callback):
    """Calls `work(model)` on worker 0 alone, when `event` comes for the second time."""

    def __init__(self, event, work):
        super().__init__()
        self.work, self.count = work, 0
        setattr(self, event, self.come)

    def come(self, number, logs=None):
        self.count += 1
        if RANK == 0 and self.count == 2:
            self.work(self.model)


def run(case, model, x, y):
    steps = FEWER if RANK == 0 else MORE
    if case == "fit":
        model.fit(x, y, batch_size=BATCH, steps_per_epoch=steps, epochs=3, verbose=0)
    elif case == "evaluate":
        model.evaluate(x, y, batch_size=BATCH, steps=steps, verbose=0)
    elif case == "a callback":
        model.fit(x, y, batch_size=BATCH, callbacks=[StopEarly()], verbose=0)
    elif case in LATE:
        # The loss of an update that comes later is that of each worker's own rows.
        x = np.array(x)
        x[BATCH] = np.nan  # a row of worker 0
        with model.distribute_strategy.scope():
            model = dense_model()
            optimizer = keras.optimizers.SGD(0.01)
            optimizer = tfdp.DistributedOptimizer(optimizer, sync=LATE[case])
            model.compile(
                optimizer, "sparse_categorical_crossentropy", jit_compile=False
            )
        ends = keras.callbacks.TerminateOnNaN()
        model.fit(x, y, batch_size=BATCH, shuffle=False, callbacks=[ends], verbose=0)
    elif case in ("evaluates after an epoch", "evaluates in an epoch"):
        event = "on_epoch_end" if "after" in case else "on_train_batch_end"
        evaluates = OnChief(event, lambda model: model.evaluate(x, y, verbose=0))
        model.fit(x, y, batch_size=BATCH, epochs=3, callbacks=[evaluates], verbose=0)
    elif case == "another fit":
        if RANK == 0:
            model.predict(x, verbose=0)
        model.fit(x, y, batch_size=BATCH, verbose=0)
    elif case == "ends":
        model.predict(x, verbose=0)
        if RANK == 1:
            model.evaluate(x, y, verbose=0)
    elif case == "alike":
        # The end of a generator is found by a step; here by one worker of two.
        told = {"steps_per_epoch": MORE} if RANK else {}
        batches = ((x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, 60, BATCH))
        model.fit(batches, verbose=0, **told)
        model.fit(x, y, batch_size=BATCH, steps_per_epoch=MORE, epochs=3, verbose=0)
        model.predict(x, batch_size=BATCH, verbose=0)


def main():
    strategy = tfdp.MultiHostDataParallelStrategy()
    with strategy.scope():
        model = dense_model()
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    x, y = classification_data(ROWS)
    for case in sys.argv[1:]:
        start = time.monotonic()
        try:
            run(case, model, x, y)
            print(f"{case}: no error")
        except Exception as error:
            print(f"{case}: {type(error).__name__} {' '.join(str(error).split())}")
        print(f"{case}: took {time.monotonic() - start:.1f} seconds", flush=True)


if __name__ == "__main__":
    main()
