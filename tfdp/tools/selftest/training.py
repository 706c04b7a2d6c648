"""Some training steps on all replicas, beside the same steps on one device."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp.errors import CollectiveError, ParityError
from tfdp.strategies.data_parallel import DataParallelStrategy
from tfdp.tools.testing.batches import collect_batches
from tfdp.tools.testing.comparison import Setting
from tfdp.tools.testing.parity import compare_and_report

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


# Sums of all replicas, held against NumPy to the last bit.


DTYPES = ("float32", "float16", "bfloat16", "float64", "int32")
# A scalar, sizes that no number of replicas divides, and more than a bucket holds.
SHAPES = ((), (1,), (7, 3), (1_000_003,), (4_099, 2_048))
CALLS = 3
# bfloat16 holds whole numbers up to here.
EXACT = 256


def largest_number(replicas: int) -> int:
    """So large may whole numbers be that no sum of them is ever rounded.

    >>> largest_number(8)
    32
    """
    return max(1, EXACT // replicas)


def check_sums(strategy: DataParallelStrategy) -> str:
    """Adds whole numbers, other ones on every replica, so that no order rounds.

    Returns:
      What was looked at, in words.

    Raises:
      CollectiveError: a sum is wrong; says which, where and by how much.
    """
    replicas = strategy.num_replicas_in_sync
    kinds = [(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    numbers = [_make_variables(strategy, kind, n) for n, kind in enumerate(kinds)]

    def in_replica() -> list[tf.Tensor]:
        context = tf.distribute.get_replica_context()
        rank = int(tf.get_static_value(context.replica_id_in_sync_group))
        mine = [values[rank].read_value() for values in numbers]
        return context.all_reduce(tf.distribute.ReduceOp.SUM, mine)

    @tf.function(autograph=False)
    def add() -> list[tuple[tf.Tensor, ...]]:
        return [
            strategy.experimental_local_results(v) for v in strategy.run(in_replica)
        ]

    for call in range(CALLS):
        for sums, values, kind in zip(add(), numbers, kinds, strict=True):
            parts = [value.numpy().astype(np.float64) for value in values]
            _compare(sums, sum(parts[1:], parts[0]), kind, call)
        for n, (kind, values) in enumerate(zip(kinds, numbers, strict=True)):
            for rank, value in enumerate(values):
                value.assign(_draw(kind, (call + 1, n, rank), replicas))
    return f"{CALLS} times {len(kinds)} tensors of {len(DTYPES)} types, bit for bit"


def _make_variables(
    strategy: DataParallelStrategy, kind: tuple[str, Any], number: int
) -> list[tf.Variable]:
    variables = []
    for rank, device in enumerate(strategy.extended.worker_devices):
        with tf.device(device):
            drawn = _draw(kind, (0, number, rank), strategy.num_replicas_in_sync)
            variables.append(tf.Variable(drawn))
    return variables


def _draw(
    kind: tuple[str, Any], seed: tuple[int, int, int], replicas: int
) -> tf.Tensor:
    dtype, shape = kind
    largest = largest_number(replicas)
    drawn = np.random.default_rng(seed).integers(
        -largest, largest, shape, endpoint=True
    )
    return tf.cast(tf.constant(drawn), dtype)


def _compare(
    sums: tuple[tf.Tensor, ...], expected: Any, kind: tuple[str, Any], call: int
) -> None:
    dtype, shape = kind
    for rank, found in enumerate(sums):
        # NaN is unlike everything, so that it counts as wrong.
        wrong = found.numpy().astype(np.float64) != expected
        if found.dtype.name != dtype or np.any(wrong):
            raise CollectiveError(
                f"A sum of {dtype} {list(shape)} is wrong on replica {rank}, in call "
                f"{call + 1}: {int(np.sum(wrong))} of {wrong.size} numbers, and it "
                f"came as {found.dtype.name}."
            )
