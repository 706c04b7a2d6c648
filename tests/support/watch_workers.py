"""A training on several hosts that is watched, and in which something goes wrong.

    python -m tests.support.watch_workers WHAT ENGINE [SHARD_GROUP]

WHAT is "healthy", "drift" (a bit of a weight of worker 1), "shard" (the same of a shard
of the optimizer's state) or "nan" (in the rows of worker 1). Prints in one line of JSON
what the worker was told.
"""

import json
import sys

import keras
import numpy as np

import tfdp
from tests.support.parity import classification_data, dense_model
from tfdp.errors import NotFiniteError, ReplicaDriftError

BATCH, BAD_BATCH = 12, 2


class Pokes(keras.callbacks.Callback):
    """Changes one bit on worker 1."""

    def __init__(self, what, rank):
        super().__init__()
        self.what, self.rank = what, rank

    def on_train_batch_end(self, batch, logs=None):
        if self.rank != 1 or batch != BAD_BATCH:
            return
        if self.what == "drift":
            copy = self.model.layers[0].kernel.value.values[-1]
        else:
            momentum = self.model.optimizer.variables[2]
            copy = momentum.value.shard(0)
        value = copy.numpy()
        flat = value.reshape(-1)
        flat[0] = np.nextafter(flat[0], np.float32(9))
        copy.assign(value)


def main(what, engine, shard_group="none"):
    strategy = tfdp.MultiHostDataParallelStrategy(
        communication=tfdp.Communication(engine=engine),
        shard="none" if shard_group == "none" else "optimizer",
        shard_group="all" if shard_group == "none" else shard_group,
        shard_min_bytes=0,
    )
    with strategy.scope():
        model = dense_model()
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
    x, y = classification_data(5 * BATCH)
    if what == "nan":
        x[(BAD_BATCH + 1) * BATCH - 1, 3] = np.nan
    check, guard = tfdp.callbacks.ReplicaCheck(1), tfdp.callbacks.NaNGuard()
    callbacks = [Pokes(what, strategy.cluster.rank), check, guard]
    if what in ("healthy", "nan"):
        del callbacks[0]
    told = {"error": None, "message": ""}
    try:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    except (NotFiniteError, ReplicaDriftError) as error:
        told = {"error": type(error).__name__, "message": str(error)}
    told["checks"] = check.checks
    told["finite"] = bool(all(np.isfinite(w).all() for w in model.get_weights()))
    print("told", json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
