"""Times `ReplicaContext.all_reduce` of a list of gradients.

Every replica reads its gradients from variables on its device, and one element of every
sum, as an update would read all. Otherwise TensorFlow returns the sums of an arm that
adds on one device from there, and the copy back to the replicas, half of the work, is
not measured. Passing gradients as arguments costs time: 10 ms for 400 of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tfdp.errors import CollectiveError
from tfdp.tools.bench.gradient_sets import GRADIENT_SETS, describe_set
from tfdp.tools.bench.one_process.arms import ARMS, STOCK_PREFIX
from tfdp.tools.bench.one_process.interleave import time_in_turn
from tfdp.tools.bench.one_process.sum_check import check_sum
from tfdp.tools.bench.request import Request
from tfdp.tools.bench.results import ArmResult, CaseResult


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
    return CaseResult(
        case=request.case.name,
        suite=request.case.suite,
        devices=len(devices),
        subject=describe_set(request.subject_name, shapes),
        settings=request.settings(),
        arms={arm: ArmResult(tuple(figures)) for arm, figures in seconds.items()},
        left_out=left_out,
    )


def make_gradients(
    shapes: Sequence[tuple[int, ...]], rank: int, device: str
) -> list[tf.Variable]:
    """Normal random numbers on `device`, different on every rank."""
    with tf.device(device):
        return [
            tf.Variable(make_gradient(shape, rank, index))
            for index, shape in enumerate(shapes)
        ]


def make_gradient(shape: tuple[int, ...], rank: int, index: int) -> tf.Tensor:
    """Gradient `index` of replica `rank`, which every process can recompute."""
    return tf.random.stateless_normal(shape, seed=[rank, index])


def make_reduction(
    strategy: tf.distribute.Strategy,
    gradients: Mapping[int, Sequence[tf.Variable]] | Sequence[Sequence[tf.Variable]],
    *,
    read: bool = False,
    sum_of: Callable[[list[tf.Tensor]], list[tf.Tensor]] | None = None,
) -> Callable[[], list[tuple[tf.Tensor, ...]]]:
    """Returns a function that sums the gradients of all replicas.

    `gradients`: by the rank of each replica of this process a list of variables. With
    `read` each replica returns one element of every sum (for timing), else the function
    returns per gradient the sum on every replica (for checking). `sum_of`, in replica
    context, replaces `ReplicaContext.all_reduce`.
    """

    def in_replica() -> list[tf.Tensor]:
        context = tf.distribute.get_replica_context()
        rank = int(tf.get_static_value(context.replica_id_in_sync_group))
        mine = [gradient.read_value() for gradient in gradients[rank]]
        if sum_of is None:
            sums = context.all_reduce(tf.distribute.ReduceOp.SUM, mine)
        else:
            sums = sum_of(mine)
        if not read:
            return sums
        return [tf.stack([value[(0,) * value.shape.rank] for value in sums])]

    @tf.function(autograph=False)
    def reduce_all() -> list[tuple[tf.Tensor, ...]]:
        sums = strategy.run(in_replica)
        return [strategy.experimental_local_results(value) for value in sums]

    return reduce_all.get_concrete_function()


def check_sums(
    arm: str,
    sums: Sequence[Sequence[tf.Tensor]],
    gradients: Sequence[Sequence[tf.Variable]],
) -> None:
    """Raises CollectiveError if an arm's sums are wrong on any replica."""
    for index, on_replicas in enumerate(sums):
        parts = [mine[index].numpy() for mine in gradients]
        check_sum(arm, index, parts, on_replicas)
