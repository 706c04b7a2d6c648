"""What a step takes in plain Keras, and under a strategy of one replica."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp.strategies.data_parallel import DataParallelStrategy
from tfdp.strategies.in_words import unsaid
from tfdp.tools.bench.one_process.interleave import turns
from tfdp.tools.selftest.memory import build_large, build_small, make_batch

REPEATS = 9
# By the type of the device: rows of a batch, and steps of a turn, small and large.
ROWS = {"CPU": (32, 32), "GPU": (64, 256)}
STEPS = {"CPU": (50, 15), "GPU": (100, 40)}
ARMS = ("plain Keras", "tfdp")


class _Clock(keras.callbacks.Callback):
    """Seconds of each step but the first, in which `fit` has set up its input.

    Keras reads the loss for a callback after every step: each step has ended then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._last: float | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now


def measure_overhead(strategy: DataParallelStrategy) -> str:
    """Times steps of `fit` in turn, so that a slow minute of the machine hits both.

    Args:
      strategy: of one replica, on the device that plain Keras takes, too.

    Returns:
      For a small and a large network both medians, and their ratio.
    """
    [device] = strategy.extended.worker_devices
    kind = str(tf.DeviceSpec.from_string(device).device_type)
    builders: dict[str, Callable[[], keras.Model]] = {
        "small": build_small,
        "large": functools.partial(build_large, kind),
    }
    told = []
    for (name, build), rows, steps in zip(
        builders.items(), ROWS[kind], STEPS[kind], strict=True
    ):
        plain, ours = _median_ms(strategy, build, rows, steps)
        told.append(
            f"{name} {plain:.3f} and {ours:.3f} ms a step ({ours / plain:.3f} of plain "
            "Keras)"
        )
    return ", ".join(told)


def _median_ms(
    strategy: DataParallelStrategy,
    build: Callable[[], keras.Model],
    rows: int,
    steps: int,
) -> list[float]:
    models = {}
    for arm in ARMS:
        keras.utils.set_random_seed(0)
        with strategy.scope() if arm == "tfdp" else contextlib.nullcontext():
            models[arm] = build()
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    batch = make_batch(models[ARMS[0]], rows)
    settings = {"steps_per_epoch": steps, "shuffle": False, "verbose": 0}
    with unsaid():
        for model in models.values():  # once before the clock, which traces the step
            model.fit(batch, **settings)
        for arm in turns(ARMS, REPEATS):
            clock = _Clock()
            models[arm].fit(batch, **settings, callbacks=[clock])
            seconds[arm] += clock.seconds
    return [1e3 * statistics.median(seconds[arm]) for arm in ARMS]
