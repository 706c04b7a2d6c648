"""Compares late updates with plain training, in processes that are delayed at random.

Samples per second of two workers, each of which sleeps before every step for a time
drawn from an exponential distribution; whether a log of all sums keeps the bound of
`BoundedStaleness`; and the test accuracy on MNIST (`--data mnist.npz`, the arrays
x_train, y_train, x_test and y_test) after as many samples, with one delay that is far
too large. Plain training waits for the slower worker in every step: with means m the
sleeps cost 1.5 m there, and m where hosts may run apart for long.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.shared import Load, least_to_most, make_parser, run_script, write_report
from tfdp.tools.processes.children import ask_child

WORKERS, BATCH = 2, 64
ARMS = {
    "plain": None,
    "Delayed(1)": ("Delayed", 1),
    "Delayed(4)": ("Delayed", 4),
    "BoundedStaleness(2)": ("BoundedStaleness", 2),
    "BoundedStaleness(8)": ("BoundedStaleness", 8),
}
ACCURACY_ARMS = {
    "plain": None,
    "Delayed(1)": ("Delayed", 1),
    "BoundedStaleness(2)": ("BoundedStaleness", 2),
    "Delayed(32)": ("Delayed", 32),
}
STEPS, QUICK_STEPS = 1000, 12
MEAN_SLEEP_SECONDS = 0.02
EPOCHS = 3


def run(options: argparse.Namespace) -> int:
    """Prints a line for each arm; returns 1 where the bound was exceeded."""
    load, results, exceeded = Load(), [], False
    for name, arm in ARMS.items():
        speeds = []
        for repeat in range(options.repeats):
            found = _run({"arm": arm, "seed": repeat}, options)
            speeds.append(min(one["samples_per_second"] for one in found))
            exceeded = exceeded or not _is_bounded(arm, found)
        print(f"{name:22} {least_to_most(speeds, '.0f')} samples/s", flush=True)
        results.append({"arm": name, "samples_per_second": speeds})
    print("the bound was exceeded" if exceeded else "no host was too far ahead")
    if options.data is not None:
        for name, arm in ACCURACY_ARMS.items():
            figures = []
            for repeat in range(options.repeats):
                asked = {"arm": arm, "seed": repeat, "data": options.data}
                figures.append(100 * _run(asked, options)[0]["accuracy"])
            print(f"{name:22} {least_to_most(figures, '.2f')} % right", flush=True)
            results.append({"arm": name, "accuracy_percent": figures})
    print(load)
    write_report(options.json, "staleness", results=results)
    return int(exceeded)


def _run(asked: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    steps = QUICK_STEPS if options.quick else STEPS
    launcher = ["-m", "tfdp", "launch", "--workers", str(WORKERS)]
    found: list[dict[str, Any]] = ask_child(
        "benchmarks.staleness",
        {"steps": steps, **asked},
        options.timeout_seconds,
        launcher,
    )
    return found


def _is_bounded(arm: Any, workers: list[dict[str, Any]]) -> bool:
    """Whether each step had the updates that it must have, all of them begun before.

    A worker notes when it begins the sum of a step, when it ends the step, and after
    how many updates. All are on one machine, with one clock.
    """
    if arm is None:
        return True
    steps = arm[1]
    for mine in workers:
        updates = 0
        for step, (ended, count) in enumerate(mine["ended"]):
            updates += count
            if updates < step + 1 - steps:
                return False
            others = (one["begun"] for one in workers)
            if updates and any(begun[updates - 1] > ended for begun in others):
                return False
    return True


def find(asked: dict[str, Any]) -> list[dict[str, Any]] | None:
    """What a worker measures; worker 0 returns that of all."""
    import json

    import keras
    import numpy as np

    import tfdp

    strategy = tfdp.MultiHostDataParallelStrategy()
    seed, is_timed = asked["seed"], "data" not in asked
    keras.utils.set_random_seed(seed)
    arm = asked["arm"]
    sync = None if arm is None else getattr(tfdp.sync, arm[0])(arm[1])
    with strategy.scope():
        inner = keras.optimizers.SGD(0.02, momentum=0.9)
        layers = [
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
        model = keras.Sequential([keras.Input((784,)), *layers])
        model.compile(
            tfdp.DistributedOptimizer(inner, sync=sync),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=False,
        )
    options = {"batch_size": BATCH, "verbose": 0}
    result: dict[str, Any] = {}
    if is_timed:
        random = np.random.default_rng(100 * seed + strategy.cluster.rank)
        x = np.random.default_rng(seed).normal(size=(BATCH, 784)).astype("float32")
        y = np.arange(BATCH) % 10
        model.fit(x, y, epochs=2, **options)  # traces the step and the end of an epoch
        log = _noted(result)
        delay = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs=None: time.sleep(
                random.exponential(MEAN_SLEEP_SECONDS)
            )
        )
        steps = asked["steps"]
        x, y = np.tile(x, (steps, 1)), np.tile(y, steps)
        start = time.perf_counter()
        model.fit(x, y, callbacks=[delay], **options)
        seconds = time.perf_counter() - start
        result["samples_per_second"] = steps * BATCH / seconds
        log()
    else:
        arrays = np.load(asked["data"])
        x, test = (
            arrays[name].reshape(-1, 784).astype("float32") / 255
            for name in ("x_train", "x_test")
        )
        epochs = EPOCHS if asked["steps"] == STEPS else 1
        model.fit(x, arrays["y_train"], epochs=epochs, **options)
        numbers = model.evaluate(test, arrays["y_test"], **options)
        result["accuracy"] = float(numbers[1])
    blobs = strategy.gather_bytes(json.dumps(result).encode(), "figures")
    if not strategy.is_chief:
        return None
    return [json.loads(blob) for blob in blobs]


def _noted(result: dict[str, Any]) -> Any:
    """Notes the sums of late updates in `result`; returns a function that ends it."""
    from tfdp.hosts.late_queue import LateQueue

    begin, take_due = LateQueue.begin, LateQueue.take_due
    result["begun"], result["ended"] = [], []

    def noted_begin(queue: LateQueue, *given: Any) -> None:
        result["begun"].append(time.monotonic())
        begin(queue, *given)

    def noted_due(queue: LateQueue) -> int:
        count = take_due(queue)
        result["ended"].append((time.monotonic(), count))
        return count

    def end() -> None:
        LateQueue.begin, LateQueue.take_due = begin, take_due  # type: ignore

    LateQueue.begin, LateQueue.take_due = noted_begin, noted_due  # type: ignore
    return end


if __name__ == "__main__":
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("--data", metavar="FILE", help="also MNIST, of this .npz file")
    run_script(parser, run, find)
