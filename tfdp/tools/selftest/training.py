"""Compares training steps on all replicas with the same steps on one device."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp import DataParallelStrategy
from tfdp.errors import CollectiveError, ParityError
from tfdp.tools.testing.batches import collect_batches
from tfdp.tools.testing.parity import compare_and_report
from tfdp.tools.testing.trainee import CheckedTraining

STEPS = 3
ROWS_OF_A_REPLICA = 8
CLASSES = 10
IMAGE = (12, 12, 3)


def check_training(strategy: DataParallelStrategy, jit_compile: bool) -> str:
    """Trains a small network, the last batch short; raises ParityError."""
    replicas = strategy.num_replicas_in_sync
    batch = ROWS_OF_A_REPLICA * replicas
    # The last batch gives some replicas one row less than others.
    rows = (STEPS - 1) * batch + batch // 2 + 1
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, *IMAGE)).astype("float32")
    y = rng.integers(0, CLASSES, size=(rows,))
    setting = CheckedTraining(
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
            # Large enough for its weights to be sharded.
            keras.layers.Dense(64, activation="relu"),
            # Always in float32, as Keras advises, so that the loss rounds little.
            keras.layers.Dense(CLASSES, dtype="float32"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Not Adam, which amplifies the rounding of a zero gradient to a whole step.
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, loss, jit_compile=jit_compile)
    return model


# Sums of all replicas, compared with NumPy bit for bit.
DTYPES = ("float32", "float16", "bfloat16", "float64", "int32")
# A scalar, sizes that no number of replicas divides, and more than a bucket holds.
SHAPES = ((), (1,), (7, 3), (1_000_003,), (4_099, 2_048))
Kind = tuple[str, Any]  # dtype, shape
CALLS = 3
# bfloat16 represents whole numbers exactly up to here.
EXACT = 256


def largest_number(replicas: int) -> int:
    """The largest whole number whose sums are never rounded.

    >>> largest_number(8)
    32
    """
    return max(1, EXACT // replicas)


def check_sums(strategy: DataParallelStrategy) -> str:
    """Adds whole numbers, which no order rounds; raises CollectiveError."""
    replicas = strategy.num_replicas_in_sync
    kinds = [(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    numbers: list[list[tf.Variable]] = []
    for n, kind in enumerate(kinds):
        numbers.append([])
        for rank, device in enumerate(strategy.extended.worker_devices):
            with tf.device(device):
                numbers[n].append(tf.Variable(_draw(kind, (0, n, rank), replicas)))

    def in_replica() -> list[tf.Tensor]:
        context = tf.distribute.get_replica_context()
        rank = int(tf.get_static_value(context.replica_id_in_sync_group))
        mine = [values[rank].read_value() for values in numbers]
        return context.all_reduce(tf.distribute.ReduceOp.SUM, mine)

    @tf.function(autograph=False)
    def add() -> list[tuple[tf.Tensor, ...]]:
        return [*map(strategy.experimental_local_results, strategy.run(in_replica))]

    for call in range(CALLS):
        for sums, values, kind in zip(add(), numbers, kinds, strict=True):
            parts = [value.numpy().astype(np.float64) for value in values]
            _compare(sums, sum(parts[1:], parts[0]), kind, call)
        for n, (kind, values) in enumerate(zip(kinds, numbers, strict=True)):
            for rank, value in enumerate(values):
                value.assign(_draw(kind, (call + 1, n, rank), replicas))
    return f"{CALLS} times {len(kinds)} tensors of {len(DTYPES)} types, bit for bit"


def _draw(kind: Kind, seed: tuple[int, int, int], replicas: int) -> tf.Tensor:
    dtype, shape = kind
    largest = largest_number(replicas)
    generator = np.random.default_rng(seed)
    drawn = generator.integers(-largest, largest, shape, endpoint=True)
    return tf.cast(tf.constant(drawn), dtype)


def _compare(sums: tuple[tf.Tensor, ...], expected: Any, kind: Kind, call: int) -> None:
    dtype, shape = kind
    for rank, found in enumerate(sums):
        # NaN differs from everything, so it counts as wrong.
        wrong = found.numpy().astype(np.float64) != expected
        if found.dtype.name != dtype or np.any(wrong):
            raise CollectiveError(
                f"A sum of {dtype} {list(shape)} is wrong on replica {rank}, in call "
                f"{call + 1}: {int(np.sum(wrong))} of {wrong.size} numbers differ, and "
                f"its dtype is {found.dtype.name}."
            )
