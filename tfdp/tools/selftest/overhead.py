"""Times a step in plain Keras and under a strategy of one replica."""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable

import keras
import tensorflow as tf

from tfdp import DataParallelStrategy
from tfdp.strategies.in_words import without_fit_message
from tfdp.tools.measuring.in_turn import turns
from tfdp.tools.selftest.memory import build_large, build_small, make_batch

REPEATS = 9
# By device type: rows of a batch and steps of a turn, for (small, large).
ROWS = {"CPU": (32, 32), "GPU": (64, 256)}
STEPS = {"CPU": (50, 15), "GPU": (100, 40)}
ARMS = ("plain Keras", "tfdp")


def measure_overhead(strategy: DataParallelStrategy) -> str:
    """Times steps of `fit` in turn, so that a slow minute of the machine hits both.

    Returns both medians and their ratio, for a small and a large network.
    """
    [device] = strategy.extended.worker_devices
    kind = str(tf.DeviceSpec.from_string(device).device_type)
    builders: dict[str, Callable[[], keras.Model]] = {
        "small": build_small,
        "large": functools.partial(build_large, kind),
    }
    lines = []
    sizes = zip(builders.items(), ROWS[kind], STEPS[kind], strict=True)
    for (name, build), rows, steps in sizes:
        plain, ours = _median_ms(strategy, build, rows, steps)
        lines.append(
            f"{name} {plain:.3f} and {ours:.3f} ms a step ({ours / plain:.3f} of plain "
            "Keras)"
        )
    return ", ".join(lines)


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
    ends: list[float] = []
    # Keras reads the loss for a callback after every step, so each step has ended.
    clock = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter())
    )
    with without_fit_message():
        for model in models.values():  # traces the step
            model.fit(batch, **settings)
        for arm in turns(ARMS, REPEATS):
            ends.clear()
            models[arm].fit(batch, **settings, callbacks=[clock])
            # Without the first step, in which `fit` sets up its input.
            seconds[arm] += [end - start for start, end in itertools.pairwise(ends)]
    return [1e3 * statistics.median(seconds[arm]) for arm in ARMS]
