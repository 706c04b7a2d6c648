"""Sums of all replicas, held against NumPy to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.errors import CollectiveError
from tfdp.strategies.data_parallel import DataParallelStrategy

__all__ = ["check_sums", "largest_number"]

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
