"""A training with and without `callbacks.Autotune` on several hosts.

    python -m tests.support.autotune_workers ENGINE WHO SECONDS

Each worker prints, in one line of JSON, the sizes that were chosen, whether all bits
are those of a training without, and what was said. WHO is "all", or the rank of the
only worker that tunes; SECONDS what one waits for the other. The hosts' clocks differ:
by worker 1's small buckets are slow, by worker 0's the program's own.
"""

import json
import sys

import keras
import numpy as np

import tfdp
from tests.support.parity import classification_data, dense_model
from tfdp.tools.callbacks import autotune as module


class Clock:
    """Steps of one second, of two where buckets are of the size that this host likes
    least."""

    def __init__(self, callback, slow_bytes):
        self.callback, self.slow_bytes, self.now = callback, slow_bytes, 0.0

    def perf_counter(self):
        size = self.callback._reducer.communication.bucket_bytes
        self.now += 2.0 if size == self.slow_bytes else 1.0
        return self.now


def fitted(strategy, callbacks):
    with strategy.scope():
        model = dense_model()
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
    x, y = classification_data(22 * 12 - 5)
    model.fit(
        x, y, batch_size=22, epochs=5, shuffle=False, verbose=0, callbacks=callbacks
    )
    return [v.numpy() for v in (*model.weights, *model.optimizer.variables)]


def main(engine, who, timeout_seconds):
    strategy = tfdp.MultiHostDataParallelStrategy(
        communication=tfdp.Communication(
            engine=engine, timeout_seconds=float(timeout_seconds)
        )
    )
    rank = strategy.cluster.rank
    tune = tfdp.callbacks.Autotune(steps=3, rounds=2, sizes=[(64, 64), (700, 700)])
    own = strategy.communication.bucket_bytes
    module.time = Clock(tune, own if rank == 0 else 64)
    mine = fitted(strategy, [tune] if who in ("all", str(rank)) else [])
    chosen = strategy.communication.bucket_bytes
    theirs = fitted(strategy, [])
    same = all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
    said = {"chosen": chosen, "same": same, "lines": tune.lines}
    print("tuned", json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
