"""The arms of `workers.py` that `bench` does not have, and the process of one.

Fewer bytes between hosts, exchanges without overlap, a process for each replica, and
PyTorch: gloo's sums and DistributedDataParallel's steps, on the same layers, optimizer,
images and threads. A member of a group is `python -m benchmarks.worker_arms ORDERS`.
"""

from __future__ import annotations

import importlib.util
import math
import resource
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from benchmarks.bench.gradient_sets import (
    FLOAT32_BYTES,
    GRADIENT_SETS,
    count_parameters,
)
from benchmarks.bench.one_process.sum_check import check_sum
from benchmarks.bench.processes import member
from benchmarks.bench.processes.arms import (
    BOTH,
    GROUP_ARMS,
    GroupArm,
    Place,
    Work,
    mpi_is_left_out,
    own_rows,
    tfdp_over,
)
from benchmarks.bench.request import Request
from tfdp.errors import CollectiveError
from tfdp.plan.buckets import TensorInfo, plan_buckets
from tfdp.plan.communication import Communication
from tfdp.tools.measuring.models import (
    BATCHES_IN_MEMORY,
    LOCAL_BATCH,
    MODELS,
    SEED,
    make_images,
)

if TYPE_CHECKING:
    import tensorflow as tf

MEMBER = "benchmarks.worker_arms"
TORCH_ONE_PROCESS = "torch-one-process"
SMALL_BUCKET_BYTES = 1 << 20
MakeStrategy = Callable[[Place], Any]


def _compressed(method: str, **options: Any) -> MakeStrategy:
    """Gradients in fewer bytes between hosts, by a method of `tfdp.compression`."""

    def make(place: Place) -> tf.distribute.Strategy:
        from tfdp import compression

        chosen = getattr(compression, method)(**options)
        return tfdp_over("sockets", compression=chosen)(place)

    return make


def _without_overlap(make: MakeStrategy) -> MakeStrategy:
    """Strategies whose exchanges wait for the whole of backprop."""

    def make_waiting(place: Place) -> tf.distribute.Strategy:
        import tensorflow as tf

        strategy = make(place)
        reducer = strategy.extended.reducer
        all_reduce = reducer.all_reduce

        def after_all(values: Any, rank: int, **options: Any) -> Any:
            # The models here have no sparse gradients.
            with tf.control_dependencies(values):
                return all_reduce([tf.identity(v) for v in values], rank, **options)

        reducer.all_reduce = after_all
        return strategy

    return make_waiting


def _coarse_sums(make: MakeStrategy, coarseness: float) -> Callable[..., Work]:
    """Work of arms whose sums lose something of a number.

    Args:
      make: their strategy.
      coarseness: see `prepare_reduction`.
    """

    def prepare(request: Request, arm: str, place: Place) -> Work:
        member.start_tensorflow(request)
        strategy = make(place)
        from benchmarks.bench.processes.work import prepare_reduction, prepare_training

        if request.case.suite == "train":
            return prepare_training(request, arm, strategy, place)
        # Gradients are made small where an optimizer needs their sums.
        sums = make_gradient_sums(strategy, GRADIENT_SETS[request.subject_name]())
        return prepare_reduction(request, arm, strategy, place, sums, coarseness)

    return prepare


def make_gradient_sums(
    strategy: tf.distribute.Strategy, shapes: Sequence[tuple[int, ...]]
) -> Callable[[list[tf.Tensor]], list[tf.Tensor]]:
    """Sums of gradients as an optimizer of tfdp's strategies has them, compressed."""
    import keras
    import tensorflow as tf

    from tfdp._private.names import current_rank
    from tfdp.chain.stages import reduce_gradients
    from tfdp.tracing.step import Step

    with strategy.scope():
        weights = [keras.Variable(tf.zeros(shape)) for shape in shapes]
        optimizer = keras.optimizers.SGD()
        optimizer.build(weights)

    def sum_of(mine: list[tf.Tensor]) -> list[tf.Tensor]:
        run = Step(strategy.num_replicas_in_sync)
        return reduce_gradients(mine, run, current_rank(), weights, optimizer)

    return sum_of


def _torch_is_left_out(devices_per_worker: int) -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed: pip install 'torch>=2.4'"
    if devices_per_worker == 1:
        return None
    return "PyTorch has one replica per process"


def prepare_torch(request: Request, arm: str, place: Place) -> Work:
    """What `arm` times, after a warm-up, and its facts.

    Raises:
      CollectiveError: when a sum is wrong, or the loss is not finite.
    """
    import torch

    torch.set_num_threads(request.intra_op_threads)
    if place.workers > 1:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{place.addresses[0]}",
            rank=place.rank,
            world_size=place.workers,
        )
    work = _reduction if request.case.suite == "allreduce" else _training
    return work(request, arm, place)


def _gradient(shape: tuple[int, ...], rank: int, index: int) -> np.ndarray:
    """The gradient `index` of worker `rank`, which every process can make."""
    return np.random.default_rng([rank, index]).standard_normal(shape, np.float32)


def _reduction(request: Request, arm: str, place: Place) -> Work:
    """Sums in place of buckets that the gradients are views of, as DDP has them."""
    import torch

    shapes = GRADIENT_SETS[request.subject_name]()
    infos = [TensorInfo(FLOAT32_BYTES * math.prod(s), "float32") for s in shapes]
    sizes = Communication()
    buckets: list[torch.Tensor] = []
    views: dict[int, torch.Tensor] = {}
    for bucket in plan_buckets(
        infos,
        bucket_bytes=sizes.bucket_bytes,
        first_bucket_bytes=sizes.first_bucket_bytes,
    ):
        elements = sum(math.prod(shapes[index]) for index in bucket.indices)
        buckets.append(torch.zeros(elements))
        start = 0
        for index in bucket.indices:
            stop = start + math.prod(shapes[index])
            views[index] = buckets[-1][start:stop].view(shapes[index])
            views[index].copy_(
                torch.from_numpy(_gradient(shapes[index], place.rank, index))
            )
            start = stop

    def call() -> list[float]:
        # All are in flight at the same time, as in DDP.
        running = [torch.distributed.all_reduce(b, async_op=True) for b in buckets]
        for exchange in running:
            exchange.wait()
        return [float(bucket[0]) for bucket in buckets]

    call()
    for index, view in views.items():
        parts = [_gradient(shapes[index], rank, index) for rank in range(place.workers)]
        check_sum(arm, index, parts, [view])
    # In place every sum would be a multiple of the last, and infinite some day.
    for flat in buckets:
        flat.zero_()
    for _ in range(request.warmup_calls):
        call()
    parameters = count_parameters(shapes)
    return call, {
        "items_per_call": 1,
        "facts": {"sums_checked": len(shapes), "torch": torch.__version__},
        "subject": {
            "name": request.subject_name,
            "tensors": len(shapes),
            "parameters": parameters,
            "bytes_per_replica": parameters * FLOAT32_BYTES,
        },
    }


def _training(request: Request, arm: str, place: Place) -> Work:
    """A step of the same network, optimizer and rows, alone or by DDP."""
    import torch

    torch.manual_seed(SEED)
    network = TORCH_MODELS[request.subject_name]()
    model: Any = network
    if place.workers > 1:
        model = torch.nn.parallel.DistributedDataParallel(
            network, gradient_as_bucket_view=True
        )
        _send_less(model, arm)
    momentum = MODELS[request.subject_name].momentum
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=momentum)
    loss_function = torch.nn.CrossEntropyLoss()
    batches = _batches(request, place)
    steps_done = 0

    def step() -> float:
        nonlocal steps_done
        images, labels = batches[steps_done % BATCHES_IN_MEMORY]
        steps_done += 1
        optimizer.zero_grad()
        loss = loss_function(model(images), labels)
        loss.backward()
        optimizer.step()
        return float(loss)

    loss = 0.0
    for _ in range(max(request.warmup_calls, BATCHES_IN_MEMORY)):
        loss = step()
    if not math.isfinite(loss):
        raise CollectiveError(
            f"Arm {arm!r} is not timed: its loss after the warm-up is {loss}."
        )
    weights = [parameter.detach().double() for parameter in network.parameters()]
    return step, {
        "items_per_call": LOCAL_BATCH * place.workers,
        "facts": {
            "weight_norm_after_warm_up": math.sqrt(
                math.fsum(float((weight**2).sum()) for weight in weights)
            ),
            "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "torch": torch.__version__,
        },
        "subject": {
            "name": request.subject_name,
            "parameters": sum(weight.numel() for weight in weights),
            "local_batch": LOCAL_BATCH,
        },
    }


def _send_less(model: Any, arm: str) -> None:
    """Registers the hook of DDP that `arm` is named for, if it is."""
    from torch.distributed.algorithms.ddp_comm_hooks import (
        default_hooks,
        powerSGD_hook,
    )

    if arm == "torch-gloo-float16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif arm == "torch-gloo-power-sgd":
        # With error feedback and warm start it begins in the third step at the soonest.
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _batches(request: Request, place: Place) -> list[tuple[Any, Any]]:
    """This worker's rows of every global batch; channels come first in PyTorch."""
    import torch

    images, labels = (
        own_rows(array, place.rank, place.workers)
        for array in make_images(
            MODELS[request.subject_name], LOCAL_BATCH * place.workers
        )
    )
    if images.ndim == 4:
        images = np.ascontiguousarray(np.moveaxis(images, -1, 1))
    rows = torch.from_numpy(images).split(LOCAL_BATCH)
    targets = torch.from_numpy(labels.astype(np.int64)).split(LOCAL_BATCH)
    return list(zip(rows, targets, strict=True))


def _mlp(inputs: int, width: int, classes: int = 10) -> Callable[[], Any]:
    def build() -> Any:
        from torch import nn

        return nn.Sequential(
            nn.Linear(inputs, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, classes),
        )

    return build


def _cnn(side: int, filters: int, width: int, classes: int = 10) -> Callable[[], Any]:
    def build() -> Any:
        from torch import nn

        pooled = (side - 4) // 2  # two convolutions take a pixel off every edge
        return nn.Sequential(
            nn.Conv2d(1, filters, 3),
            nn.ReLU(),
            nn.Conv2d(filters, 2 * filters, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * filters * pooled**2, width),
            nn.ReLU(),
            nn.Linear(width, classes),
        )

    return build


def _words(words: int, width: int, classes: int = 10) -> Callable[[], Any]:
    def build() -> Any:
        from torch import nn

        return nn.Sequential(
            nn.EmbeddingBag(words, width, mode="mean"), nn.Linear(width, classes)
        )

    return build


TORCH_MODELS = {
    "mlp-20m": _mlp(784, 4096),
    "mlp-tiny": _mlp(8, 16),
    "cnn-1m": _cnn(28, 32, 128),
    "cnn-tiny": _cnn(8, 2, 4),
    "words-13m": _words(200_000, 64),
    "words-tiny": _words(900, 8),
}


def _arm(
    make: MakeStrategy | None,
    works: tuple[str, ...] = ("train",),
    start: Literal["local", "mpi", "single"] = "local",
    **more: Any,
) -> GroupArm:
    return GroupArm(start, works, make, by_default=False, member=MEMBER, **more)


def _torch_arm(works: tuple[str, ...] = ("train",), **more: Any) -> GroupArm:
    return _arm(
        None,
        works,
        why_left_out=_torch_is_left_out,
        prepare=prepare_torch,
        one_process=TORCH_ONE_PROCESS,
        **more,
    )


def _more_arms() -> dict[str, GroupArm]:
    bfloat16 = tfdp_over("sockets", wire_dtype="bfloat16")
    int8 = _compressed("Int8")
    return {
        TORCH_ONE_PROCESS: _torch_arm(start="single"),
        "torch-gloo": _torch_arm(BOTH),
        "torch-gloo-flat": _torch_arm(BOTH, is_flat=True),
        "torch-gloo-float16": _torch_arm(),
        "torch-gloo-power-sgd": _torch_arm(),
        "tfdp-sockets-flat": _arm(tfdp_over("sockets"), BOTH, is_flat=True),
        "tfdp-sockets-no-overlap": _arm(_without_overlap(tfdp_over("sockets"))),
        "tfdp-sockets-small-buckets": _arm(
            tfdp_over("sockets", bucket_bytes=SMALL_BUCKET_BYTES)
        ),
        # Each host rounds once, and the sum is rounded once more.
        "tfdp-sockets-bfloat16": _arm(
            None, BOTH, prepare=_coarse_sums(bfloat16, 2.0**-7)
        ),
        "tfdp-sockets-float16": _arm(tfdp_over("sockets", wire_dtype="float16")),
        "tfdp-mpi-bfloat16": _arm(
            tfdp_over("mpi", wire_dtype="bfloat16"),
            start="mpi",
            why_left_out=mpi_is_left_out,
        ),
        # Of 127 steps each number is off by half of one at most.
        "tfdp-sockets-int8": _arm(None, BOTH, prepare=_coarse_sums(int8, 1 / 127)),
        "tfdp-sockets-sign": _arm(_compressed("SignSGD")),
        "tfdp-sockets-top-k": _arm(_compressed("TopK", ratio=0.01)),
        "tfdp-sockets-power-sgd": _arm(_compressed("PowerSGD", rank=1, start_step=0)),
    }


ARMS = GROUP_ARMS
ARMS.update(_more_arms())

if __name__ == "__main__":
    member.main(sys.argv[1:])
