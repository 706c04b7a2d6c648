"""What a process does in its turn with PyTorch: gloo sums, or DDP training steps.

PyTorch is wanted by these arms alone, as something to compare with.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdp.bench.one_process.sum_check import check_sum
from tfdp.bench.processes.arms import Place
from tfdp.bench.request import Request
from tfdp.bench.subjects.gradient_sets import (
    FLOAT32_BYTES,
    GRADIENT_SETS,
    count_parameters,
)
from tfdp.bench.subjects.images import (
    BATCHES_IN_MEMORY,
    LOCAL_BATCH,
    SEED,
    make_images,
    own_rows,
)
from tfdp.bench.subjects.models import MODELS
from tfdp.bench.subjects.torch_models import TORCH_MODELS
from tfdp.errors import CollectiveError
from tfdp.plan.buckets import TensorInfo, plan_buckets
from tfdp.plan.communication import Communication

__all__ = ["prepare_torch"]

Work = tuple[Callable[[], object], dict[str, Any]]


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
    work = _reduction if request.case.work == "allreduce" else _training
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
