"""Times `ReplicaContext.all_reduce` of a list of gradients.

Every replica holds gradients of its own, already on its device. The timed function
returns the sums of all replicas as they are: nothing copies them, and since they
leave the function, nothing of the reduction can be optimised away.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.bench.arms import ARMS, STOCK_PREFIX
from tfdp.bench.gradient_sets import FLOAT32_BYTES, GRADIENT_SETS, count_parameters
from tfdp.bench.interleave import time_in_turn
from tfdp.bench.request import Request
from tfdp.bench.results import ArmResult, CaseResult
from tfdp.errors import CollectiveError

__all__ = ["check_sums", "make_reduction", "measure_reduction"]

# Half the distance from 1 to the next float32: the most one addition is off, relative.
FLOAT32_ROUNDING = 2.0**-24


def measure_reduction(request: Request, devices: list[str]) -> CaseResult:
    """Runs an "allreduce" case in this process.

    Args:
      request: what to run.
      devices: names of the devices, one replica each.

    Raises:
      CollectiveError: when sums are wrong; a stock arm is then left out instead.
    """
    shapes = GRADIENT_SETS[request.subject_name]()
    gradients = [_gradients(shapes, rank, name) for rank, name in enumerate(devices)]
    reductions, left_out = {}, {}
    for arm in request.arm_names:
        reduction = make_reduction(ARMS[arm](devices), gradients)
        try:
            check_sums(arm, reduction(), gradients)
        except CollectiveError as error:
            if not arm.startswith(STOCK_PREFIX):
                raise
            left_out[arm] = str(error)
            continue
        for _ in range(request.warmup_calls):
            reduction()
        reductions[arm] = reduction
    seconds = time_in_turn(
        reductions,
        repeats=request.repeats,
        calls=request.calls,
        finish=tf.test.experimental.sync_devices,
    )
    parameters = count_parameters(shapes)
    return CaseResult(
        case=request.case_name,
        suite=request.case.suite,
        devices=len(devices),
        subject={
            "name": request.subject_name,
            "tensors": len(shapes),
            "parameters": parameters,
            "bytes_per_replica": parameters * FLOAT32_BYTES,
        },
        settings=request.settings(),
        arms={arm: ArmResult(tuple(figures)) for arm, figures in seconds.items()},
        left_out=left_out,
    )


def _gradients(
    shapes: Sequence[tuple[int, ...]], rank: int, device: str
) -> list[tf.Tensor]:
    with tf.device(device):
        return [
            tf.random.stateless_normal(shape, seed=[rank, index])
            for index, shape in enumerate(shapes)
        ]


def make_reduction(
    strategy: tf.distribute.Strategy, gradients: Sequence[Sequence[tf.Tensor]]
) -> functools.partial[list[tuple[tf.Tensor, ...]]]:
    """One call that sums the gradients of all replicas.

    Args:
      strategy: has as many replicas as `gradients` has lists.
      gradients: per replica one list of tensors, in the same order.

    Returns:
      A function of nothing; per gradient it returns the sum on every replica.
    """
    per_replica = tuple(
        strategy.experimental_distribute_values_from_function(
            lambda context, index=index: gradients[context.replica_id_in_sync_group][
                index
            ]
        )
        for index in range(len(gradients[0]))
    )

    def in_replica(*mine: tf.Tensor) -> list[tf.Tensor]:
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, list(mine))

    @tf.function(autograph=False)
    def reduce_all(*per_replica: Any) -> list[tuple[tf.Tensor, ...]]:
        sums = strategy.run(in_replica, args=per_replica)
        return [strategy.experimental_local_results(value) for value in sums]

    return functools.partial(reduce_all, *per_replica)


def check_sums(
    arm: str,
    sums: Sequence[Sequence[tf.Tensor]],
    gradients: Sequence[Sequence[tf.Tensor]],
) -> None:
    """Refuses to time an arm whose sums are wrong on any replica.

    N float32 numbers added in any order are off by at most N - 1 roundings of the
    sum of their magnitudes; twice that is allowed.

    Raises:
      CollectiveError: naming the arm, the tensor and the replica.
    """
    for index, on_replicas in enumerate(sums):
        parts = [mine[index].numpy().astype(np.float64) for mine in gradients]
        expected = sum(parts)
        allowed = 2 * (len(parts) - 1) * FLOAT32_ROUNDING * sum(map(np.abs, parts))
        for rank, value in enumerate(on_replicas):
            error = np.abs(value.numpy() - expected)
            if not np.all(error <= allowed):
                raise CollectiveError(
                    f"Arm {arm!r} is not timed: its sum of gradient {index} "
                    f"(shape {tuple(value.shape)}) on replica {rank} is off by "
                    f"{np.max(error):.3g}. At most {np.max(allowed):.3g} is rounding."
                )
