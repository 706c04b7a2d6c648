"""Times the sums of several arms in one process."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from benchmarks.bench.gradient_sets import GRADIENT_SETS, describe_set
from benchmarks.bench.one_process.arms import ARMS, STOCK_PREFIX
from benchmarks.bench.one_process.sum_check import check_sum
from benchmarks.bench.request import Request
from benchmarks.bench.results import ArmResult, CaseResult
from tfdp.errors import CollectiveError
from tfdp.tools.measuring.in_turn import time_in_turn
from tfdp.tools.measuring.sums import make_gradients, make_reduction


def measure_reduction(request: Request, devices: list[str]) -> CaseResult:
    """Runs an "allreduce" case in this process, with one replica per device.

    Raises CollectiveError if sums are wrong; a stock arm is left out instead.
    """
    shapes = GRADIENT_SETS[request.subject_name]()
    gradients = [
        make_gradients(shapes, rank, device) for rank, device in enumerate(devices)
    ]
    reductions, left_out = {}, {}
    for arm in request.arm_names:
        strategy = ARMS[arm](devices)
        try:
            check_sums(arm, make_reduction(strategy, gradients)(), gradients)
        except CollectiveError as error:
            if not arm.startswith(STOCK_PREFIX):
                raise
            left_out[arm] = str(error)
            continue
        reduction = make_reduction(strategy, gradients, read=True)
        for _ in range(request.warmup_calls):
            reduction()
        reductions[arm] = reduction
    seconds = time_in_turn(
        reductions,
        repeats=request.repeats,
        calls=request.calls,
        finish=tf.test.experimental.sync_devices,
    )
    return request.result(
        describe_set(request.subject_name, shapes),
        {arm: ArmResult(tuple(figures)) for arm, figures in seconds.items()},
        left_out,
    )


def check_sums(
    arm: str,
    sums: Sequence[Sequence[tf.Tensor]],
    gradients: Sequence[Sequence[tf.Variable]],
) -> None:
    """Raises CollectiveError if an arm's sums are wrong on any replica."""
    for index, on_replicas in enumerate(sums):
        parts = [mine[index].numpy() for mine in gradients]
        check_sum(arm, index, parts, on_replicas)
