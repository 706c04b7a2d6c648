"""Times how fast a training is written and read, and what saving costs `fit`.

First a network of 100 million weights with Adam, 1.2 GB, in several ways, in turn, on
one disk. Every way ends when its files are on the disk (`fsync`). Beside it `cp`: a
file of as many bytes that is copied.

Then steps of `fit` that is saved every 100 steps: the network of 20 million parameters
with Adam, 240 MB, on one device. Timed from the tenth step to the last, which comes
half as many steps after the second save: by then what was saved is written, and what
`fit` does when it ends is not counted. And the last as many steps by themselves, with
the second save in the middle: what every later one costs, while the first takes memory
that is new.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.shared import least_to_most, make_parser, run_script, write_report
from tfdp.callbacks import Checkpoint as CheckpointCallback
from tfdp.checkpoint import Checkpoint
from tfdp.files.atomic import sync_file
from tfdp.strategies.data_parallel import DataParallelStrategy
from tfdp.tools.measuring.models import LOCAL_BATCH, MODELS, SEED, make_images

WIDTH, LAYERS = 5_000, 4
QUICK_WIDTH = 250
BYTES_OF_A_WEIGHT = 3 * 4  # with Adam's two averages, in float32
Seconds = dict[str, list[float]]
EVERY_STEPS, QUICK_EVERY_STEPS = 100, 10
FIRST_STEPS = 10
NOT_SAVED = "not saved"
ALL, LATER = "from the tenth step on", "around the second save"
# By the steps that are timed, and by way: of each repeat.
StepSeconds = dict[str, dict[str, list[float]]]
MakeCallback = Callable[[keras.Model, Path], list[keras.callbacks.Callback]]


def measure_ways(*, repeats: int, quick: bool) -> tuple[int, Seconds]:
    """The bytes that are written, and the seconds of each way in each repeat."""
    model = _model(QUICK_WIDTH if quick else WIDTH)
    size_bytes = BYTES_OF_A_WEIGHT * model.count_params()
    seconds: Seconds = {}
    with tempfile.TemporaryDirectory(prefix="tfdp-bench-") as folder:
        ways = _ways(model, Path(folder), size_bytes)
        for _ in range(repeats):
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                seconds.setdefault(name, []).append(time.perf_counter() - start)
    return size_bytes, seconds


def _model(width: int) -> keras.Model:
    layers = [keras.layers.Dense(width) for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    model.compile(keras.optimizers.Adam(), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def _ways(
    model: keras.Model, folder: Path, size_bytes: int
) -> dict[str, Callable[[], object]]:
    source = folder / "source"
    noise = np.random.default_rng(0).bytes(min(size_bytes, 2**24))
    with source.open("wb") as file:
        for _ in range(-(-size_bytes // len(noise))):
            file.write(noise)
    mine = Checkpoint(folder / "tfdp", keep=1)
    stock = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    steps = iter(range(10**9))

    def copy() -> None:
        shutil.copyfile(source, folder / "copy")
        sync_file(folder / "copy")

    def stock_write() -> None:
        path = stock.write(os.fspath(folder / "stock"))
        for part in folder.glob(Path(path).name + ".*"):
            sync_file(part)

    def keras_write() -> None:
        model.save_weights(folder / "keras.weights.h5")
        sync_file(folder / "keras.weights.h5")

    return {
        "cp": copy,
        "tfdp: training waits": lambda: mine.save(model, step=next(steps)),
        "tfdp: rest of the write": mine.wait,
        "tfdp: read": lambda: mine.restore(model),
        "tf.train.Checkpoint: write": stock_write,
        "tf.train.Checkpoint: read": lambda: stock.read(os.fspath(folder / "stock")),
        "Keras (BackupAndRestore): write": keras_write,
        "Keras (BackupAndRestore): read": lambda: model.load_weights(
            folder / "keras.weights.h5"
        ),
    }


def table_of_ways(size_bytes: int, repeats: int, seconds: Seconds) -> str:
    """A line for each way, beside `cp`."""
    lines = [
        f"{size_bytes / 1e6:.0f} MB, one process; {repeats} repeats in turn, median "
        "(least to most)",
        f"{'':34s} {'seconds':>26s} {'GB/s':>7s} {'of cp':>6s}",
    ]
    copied = statistics.median(seconds["cp"])
    for name, found in seconds.items():
        middle = statistics.median(found)
        lines.append(
            f"{name:34s} {least_to_most(found, '.3f'):>26s} "
            f"{size_bytes / middle / 1e9:7.2f} {copied / middle:6.2f}"
        )
    return "\n".join(lines)


def measure_fits(*, repeats: int, quick: bool) -> StepSeconds:
    """Seconds per step of each way, in each repeat."""
    every = QUICK_EVERY_STEPS if quick else EVERY_STEPS
    steps = 5 * every // 2
    subject = MODELS["mlp-tiny" if quick else "mlp-20m"]
    with DataParallelStrategy(["CPU:0"]).scope():
        keras.utils.set_random_seed(SEED)
        model = subject.build(subject.input_shape, subject.classes)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-4), loss)
    images = tf.data.Dataset.from_tensor_slices(make_images(subject, LOCAL_BATCH))
    batches = images.batch(LOCAL_BATCH, drop_remainder=True).repeat()
    model.fit(batches, steps_per_epoch=2, epochs=1, verbose=0)
    seconds: StepSeconds = {ALL: {}, LATER: {}}
    for _ in range(repeats):
        for name, make in _fit_ways(every).items():
            with tempfile.TemporaryDirectory(prefix="tfdp-bench-") as folder:
                timer = _Timer()
                callbacks = [timer, *make(model, Path(folder))]
                model.fit(
                    batches, steps_per_epoch=steps, verbose=0, callbacks=callbacks
                )
            for which, before in ((ALL, FIRST_STEPS), (LATER, steps - every)):
                taken = timer.ends[-1] - timer.ends[before - 1]
                seconds[which].setdefault(name, []).append(taken / (steps - before))
    return seconds


class _Timer(keras.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # With no logs, Keras has not waited for the step; it does for the next.
        self.ends.append(time.perf_counter())


class _Managed(keras.callbacks.Callback):
    """`tf.train.CheckpointManager` every so many steps."""

    def __init__(self, folder: Path, every: int):
        super().__init__()
        self._folder, self._every = os.fspath(folder), every

    def on_train_begin(self, logs: Any = None) -> None:
        checkpoint = tf.train.Checkpoint(
            model=self.model, optimizer=self.model.optimizer
        )
        self._manager = tf.train.CheckpointManager(checkpoint, self._folder, 1)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not (batch + 1) % self._every:
            self._manager.save()


def _fit_ways(every: int) -> dict[str, MakeCallback]:
    return {
        NOT_SAVED: lambda model, folder: [],
        "tfdp.callbacks.Checkpoint": lambda model, folder: [
            CheckpointCallback(folder, every_steps=every, keep=1)
        ],
        "keras BackupAndRestore": lambda model, folder: [
            keras.callbacks.BackupAndRestore(os.fspath(folder), save_freq=every)
        ],
        "tf.train.CheckpointManager": lambda model, folder: [_Managed(folder, every)],
    }


def table_of_fits(repeats: int, quick: bool, seconds: StepSeconds) -> str:
    """A line for each way: its steps, and what they take more."""
    every = QUICK_EVERY_STEPS if quick else EVERY_STEPS
    lines = [
        f"a step of fit, saved every {every}; {repeats} repeats in turn, median "
        "(least to most)"
    ]
    for which, of_ways in seconds.items():
        lines.append(f"{which:34s} {'ms a step':>26s} {'more than not saved':>30s}")
        plain = of_ways[NOT_SAVED]
        for name, found in of_ways.items():
            # Each beside the one of its own repeat.
            more = [100 * (a / b - 1) for a, b in zip(found, plain, strict=True)]
            took = least_to_most([1e3 * each for each in found], ".1f")
            costs = least_to_most(more, "+.1f", " %")
            lines.append(f"{name:34s} {took:>26s} {costs:>30s}")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> int:
    """Prints both tables."""
    repeats, quick = options.repeats, options.quick
    size_bytes, seconds = measure_ways(repeats=repeats, quick=quick)
    print(table_of_ways(size_bytes, repeats, seconds), end="\n\n", flush=True)
    fits = measure_fits(repeats=repeats, quick=quick)
    print(table_of_fits(repeats, quick, fits))
    figures = {"bytes": size_bytes, "seconds": seconds, "step_seconds": fits}
    write_report(options.json, "checkpoint", **figures)
    return 0


if __name__ == "__main__":
    run_script(make_parser(__doc__, repeats=5), run)
