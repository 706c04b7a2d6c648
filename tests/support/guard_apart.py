"""Hosts that train apart, of which one gets a NaN: it looks for the cause alone.

    python -m tests.support.guard_apart

Prints in one line of JSON what the worker found, and its weights.
"""

import dataclasses
import json
import warnings

import keras
import numpy as np

import tfdp

BATCH, BAD_ROW = 12, 23  # the last row of the second batch: of worker 1


def main():
    strategy = tfdp.auto_strategy()
    x = np.random.default_rng(0).normal(size=(4 * BATCH, 5)).astype("float32")
    y = x[:, :1].copy()
    x[BAD_ROW] = np.nan
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        optimizer = tfdp.DistributedOptimizer(
            keras.optimizers.SGD(0.05), sync=tfdp.sync.LocalSGD(every=2)
        )
        model.compile(optimizer, "mse", jit_compile=False)
    guard = tfdp.callbacks.NaNGuard("skip")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(x, y, BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[guard])
    found = [dataclasses.astuple(finding)[:3] for finding in guard.findings]
    weights = [w.tolist() for w in model.get_weights()]
    print("told", json.dumps({"found": found, "weights": weights}), flush=True)


if __name__ == "__main__":
    main()
