"""A worker that trains at its own pace, with its own number of steps in an epoch.

    python -m tests.support.own_steps FOLDER DATA STEPS SLOW AT EVERY

DATA is "arrays", "own" (each worker's own batches) or "validated" (arrays, with an
evaluation after each epoch). STEPS is a list such as 7,2: by worker, the steps of an
epoch. Worker SLOW waits before its step AT, or with "looks" in its first evaluation,
until the file "go" is in FOLDER; the others note in FOLDER/steps.RANK how many steps
they have made. EVERY is `every_steps` of the checkpoints in FOLDER/saved; 0: one at the
end of each epoch.
"""

import json
import os
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.support.apart import linear_model, regression_data

EPOCHS, BATCH = 2, 8
LONGEST_SECONDS = 300


class Pace(keras.callbacks.Callback):
    """Notes the steps, and lets one worker wait before one of them."""

    def __init__(self, folder, rank, waits_at):
        super().__init__()
        self.folder, self.rank, self.waits_at = folder, rank, waits_at
        self.steps = 0

    def on_train_batch_begin(self, batch, logs=None):
        if self.steps == self.waits_at:
            self.wait()

    def on_test_begin(self, logs=None):
        if self.waits_at == "looks":
            self.wait()

    def wait(self):
        until = time.monotonic() + LONGEST_SECONDS
        (self.folder / f"waits.{self.rank}").touch()
        while not (self.folder / "go").exists() and time.monotonic() < until:
            time.sleep(0.02)

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        with (self.folder / f"steps.{self.rank}").open("a") as file:
            file.write(".")


def main(folder, data, steps, slow, at, every):
    folder, rank = pathlib.Path(folder), int(os.environ["TFDP_RANK"])
    steps = [int(one) for one in steps.split(",")]
    communication = tfdp.Communication(timeout_seconds=60.0)
    strategy = tfdp.MultiHostDataParallelStrategy(communication=communication)
    with strategy.scope():
        model = linear_model()
        sync = tfdp.sync.Asynchronous()
        optimizer = tfdp.DistributedOptimizer(keras.optimizers.SGD(0.01), sync=sync)
        model.compile(optimizer, "mse", jit_compile=False)
    x, y = regression_data(EPOCHS * max(steps) * BATCH)

    def own(context):
        count = steps[context.input_pipeline_id] * BATCH
        return tf.data.Dataset.from_tensor_slices((x[:count], y[:count])).batch(BATCH)

    options = {"epochs": EPOCHS, "verbose": 0}
    if data == "own":
        given = (strategy.distribute_datasets_from_function(own),)
    else:
        options |= {"steps_per_epoch": steps[rank], "batch_size": BATCH}
        given = x, y
    if data == "validated":
        options |= {"validation_data": (x, y), "validation_batch_size": BATCH}
    saves = tfdp.callbacks.Checkpoint(folder / "saved", every_steps=int(every) or None)
    at = at if at == "looks" else int(at)
    pace = Pace(folder, rank, at if rank == int(slow) else -1)
    model.fit(*given, shuffle=False, callbacks=[pace, saves], **options)
    weights = [np.asarray(w).tolist() for w in model.get_weights()]
    updates = int(model.optimizer.iterations.numpy())
    (folder / f"ended.{rank}").write_text(json.dumps([updates, weights]))


if __name__ == "__main__":
    main(*sys.argv[1:])
