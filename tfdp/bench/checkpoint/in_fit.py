"""Steps of `fit` that is saved every 100 steps, in several ways, in turn.

The network of 20 million parameters with Adam, 240 MB, on one device. Timed from the
tenth step to the last, which comes half as many steps after the second save: by then
what was saved is written, and what `fit` does when it ends is not counted. And the last
as many steps by themselves, with the second save in the middle: what every later one
costs, while the first takes memory that is new.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdp.bench.results import least_to_most
from tfdp.bench.subjects.images import LOCAL_BATCH, SEED, make_images
from tfdp.bench.subjects.models import MODELS
from tfdp.callbacks import Checkpoint
from tfdp.strategies.data_parallel import DataParallelStrategy

__all__ = ["measure_fits", "table_of_fits"]

EVERY_STEPS, QUICK_EVERY_STEPS = 100, 10
FIRST_STEPS = 10
NOT_SAVED = "not saved"
ALL, LATER = "from the tenth step on", "around the second save"
# By the steps that are timed, and by way: of each repeat.
StepSeconds = dict[str, dict[str, list[float]]]
MakeCallback = Callable[[keras.Model, Path], list[keras.callbacks.Callback]]


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
        for name, make in _ways(every).items():
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


def _ways(every: int) -> dict[str, MakeCallback]:
    return {
        NOT_SAVED: lambda model, folder: [],
        "tfdp.callbacks.Checkpoint": lambda model, folder: [
            Checkpoint(folder, every_steps=every, keep=1)
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
