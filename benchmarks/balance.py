"""Times training with one slow worker, with equal rows and with `balance="speed"`.

Each worker sleeps in a layer in proportion to its rows, the last one longer by a
factor: so more workers than cores run here as on machines of their own. Groups of
workers take turns, each a new job: equal rows, balanced rows, and so on. With n workers
and a factor f a step takes n f / (n - 1 + 1 / f) / n of its time at best: 1 / 2.5 with
one of 4 workers 3 times slower, 1 / 2 with one of 2.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import statistics
import time
from typing import Any

from benchmarks.shared import Load, least_to_most, make_parser, run_script, write_report
from tfdp.cluster.addresses import LOOPBACK, free_port
from tfdp.cluster.description import join_address
from tfdp.tools.processes.children import ask_child

ARMS = (None, "speed")
GROUPS, QUICK_GROUPS = (4, 2), (2,)
BATCH_ROWS, SECONDS_OF_ROW, FACTOR = 128, 0.005, 3.0
FEATURES, CLASSES = 16, 4
# Shares settle after some 11 steps; the last steps count.
STEPS, COUNTED_STEPS = 45, 20


def find(request: dict[str, Any]) -> dict[str, Any] | None:
    """What a worker measures: seconds of each step, and the shares at the end."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdp

    strategy = tfdp.MultiHostDataParallelStrategy(balance=request["balance"])
    rank, workers = strategy.cluster.rank, strategy.cluster.workers
    seconds_of_row = request["seconds_of_row"]
    if rank == workers - 1:
        seconds_of_row *= FACTOR

    class Sleep(keras.layers.Layer):
        """Passes on its rows, after a while for each of them."""

        def call(self, rows: tf.Tensor) -> tf.Tensor:
            def sleep(given: np.ndarray) -> np.ndarray:
                time.sleep(len(given) * seconds_of_row)
                return given

            slept = tf.numpy_function(sleep, [tf.stop_gradient(rows)], rows.dtype)
            return rows + tf.stop_gradient(tf.ensure_shape(slept, rows.shape) - rows)

        def compute_output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
            return shape

    ends: list[float] = []
    note_end = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter())
    )
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((FEATURES,)), keras.layers.Dense(32, "relu"), Sleep()]
            + [keras.layers.Dense(CLASSES)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
    rows = BATCH_ROWS * request["steps"]
    x = np.random.default_rng(0).standard_normal((rows, FEATURES), np.float32)
    y = np.arange(rows) % CLASSES
    model.fit(x, y, batch_size=BATCH_ROWS, verbose=0, callbacks=[note_end])
    step_seconds = [after - before for before, after in itertools.pairwise(ends)]
    return {"step_seconds": step_seconds, "state": strategy.shared_state()}


def run(options: argparse.Namespace) -> int:
    """Prints a line for each number of workers."""
    load, results = Load(), []
    steps, counted = (4, 2) if options.quick else (STEPS, COUNTED_STEPS)
    for workers in QUICK_GROUPS if options.quick else GROUPS:
        request = {"steps": steps, "seconds_of_row": SECONDS_OF_ROW}
        rates: dict[str, list[float]] = {str(arm): [] for arm in ARMS}
        for _, arm in itertools.product(range(options.repeats), ARMS):
            found = _measure(workers, request | {"balance": arm}, options)
            seconds = statistics.median(found["step_seconds"][-counted:])
            rates[str(arm)].append(BATCH_ROWS / seconds)
        pairs = zip(rates["speed"], rates["None"], strict=True)
        gains = [balanced / plain for balanced, plain in pairs]
        ideal = FACTOR / workers * (workers - 1 + 1 / FACTOR)
        print(
            f"{workers} workers, one of them {FACTOR:g} times slower: samples/s "
            f"{least_to_most(rates['None'], '.0f')} with equal rows, "
            f"{least_to_most(rates['speed'], '.0f')} balanced "
            f"({', '.join(words for _, words in found['state'])}); "
            f"{least_to_most(gains, '.2f')} times as many, ideal {ideal:g}",
            flush=True,
        )
        load.note()
        results.append({"workers": workers, "ideal": ideal, "samples_per_s": rates})
    print(load)
    write_report(options.json, "balance", results=results)
    return 0


def _measure(
    workers: int, request: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """What worker 0 of a new job found."""
    coordinator = join_address(LOOPBACK, free_port())
    job = {"TFDP_WORKERS": str(workers), "TFDP_COORDINATOR": coordinator}
    start = functools.partial(
        ask_child, "benchmarks.balance", request, options.timeout_seconds
    )
    with concurrent.futures.ThreadPoolExecutor(workers) as threads:
        jobs = [
            threads.submit(start, **job, TFDP_RANK=str(rank)) for rank in range(workers)
        ]
        return [one.result() for one in jobs][0]


if __name__ == "__main__":
    run_script(make_parser(__doc__, repeats=3), run, find)
