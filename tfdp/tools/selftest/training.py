"""Some training steps on all replicas, beside the same steps on one device."""

from __future__ import annotations

import functools

import keras
import numpy as np

from tfdp.errors import ParityError
from tfdp.strategies.data_parallel import DataParallelStrategy
from tfdp.tools.testing.batches import collect_batches
from tfdp.tools.testing.comparison import Setting
from tfdp.tools.testing.parity import compare_and_report

__all__ = ["check_training"]

STEPS = 3
ROWS_OF_A_REPLICA = 8
CLASSES = 10
IMAGE = (12, 12, 3)


def check_training(strategy: DataParallelStrategy, jit_compile: bool) -> str:
    """Trains a small convolutional network; the last batch is a short one.

    Returns:
      What was looked at, in words.

    Raises:
      ParityError: a weight differs by more than rounding explains; with the report.
    """
    replicas = strategy.num_replicas_in_sync
    batch = ROWS_OF_A_REPLICA * replicas
    # The last batch gives some replicas one row less than others.
    rows = (STEPS - 1) * batch + batch // 2 + 1
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, *IMAGE)).astype("float32")
    y = rng.integers(0, CLASSES, size=(rows,))
    setting = Setting(
        build=functools.partial(_build, jit_compile),
        strategy=strategy,
        batches=collect_batches((x, y), STEPS, batch),
        seed=0,
    )
    report, _ = compare_and_report(setting, diagnose=replicas > 1)
    if not report.ok:
        raise ParityError(str(report), report=report)
    other = "as on one device" if replicas > 1 else "as in plain Keras"
    return f"{report.steps} steps {other}: {len(report.rows)} variables"


def _build(jit_compile: bool) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input(IMAGE),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.LayerNormalization(),
            keras.layers.Flatten(),
            # Large enough that its weights are sharded.
            keras.layers.Dense(64, activation="relu"),
            # In float32 under every policy, as Keras advises: losses round little.
            keras.layers.Dense(CLASSES, dtype="float32"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # SGD, since Adam makes a whole step of the rounding of a gradient that is zero.
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, loss, jit_compile=jit_compile)
    return model
