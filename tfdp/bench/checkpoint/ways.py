"""Writes and reads one training in several ways, in turn, on one disk.

A network of 100 million weights with Adam, 1.2 GB. Every way ends when its files are on
the disk (`fsync`). Beside it `cp`: a file of as many bytes that is copied.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfdp.bench.results import least_to_most
from tfdp.checkpoint import Checkpoint
from tfdp.files.atomic import sync_file

__all__ = ["measure_ways", "table_of_ways"]

WIDTH, LAYERS = 5_000, 4
QUICK_WIDTH = 250
BYTES_OF_A_WEIGHT = 3 * 4  # with Adam's two averages, in float32
Seconds = dict[str, list[float]]


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
