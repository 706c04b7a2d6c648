"""Published runs, and the simulator's prediction of each.

Each prediction uses the paper's hardware, model and settings, and constants that are
the same for all. Only JITTER was fitted, to one figure (Horovod's Inception V3, where
sums hide behind backward).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from tfdp.tools.simulator.failures import Jitter, expected_maximum
from tfdp.tools.simulator.known import HARDWARE, MODELS
from tfdp.tools.simulator.model import Compute
from tfdp.tools.simulator.step import Training, predict_step

#: Standard deviation of a replica's step, as a share of it.
JITTER = 0.03
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Point:
    """A published figure.

    `quantity` and `published` are what it is and its value; `predict` returns the
    simulator's value; `is_fitted`: JITTER was fitted to it.
    """

    name: str
    source: str
    quantity: str
    published: float
    predict: Callable[[], float]
    is_fitted: bool = False

    @property
    def error(self) -> float:
        """(predicted - published) / published."""
        return self.predict() / self.published - 1


def _horovod(model: str, images_per_second: float) -> float:
    """Efficiency at 512 GPUs: batch 64, NCCL's ring over all, fusion of 64 MB.

    Horovod sends what is ready every 5 ms, so the first message is not full: 1 MiB.
    """
    training = Training(
        MODELS[model](),
        Compute.from_seconds(64 / images_per_second, samples=64),
        HARDWARE["p100-25gbit"],
        algorithm="ring",
        bucket_bytes=64 * MIB,
        first_bucket_bytes=MIB,
        jitter=Jitter(JITTER),
    )
    return predict_step(training, 512).efficiency


def _goyal(devices: int) -> float:
    """Samples a second per GPU, over those of 8: batch 32, one tensor per sum, sums
    within servers, then halving and doubling between them."""
    # 90 epochs of 1,281,167 images took 29 hours on 8 GPUs.
    images_per_second = 90 * 1_281_167 / (29 * 3600) / 8
    training = Training(
        MODELS["resnet50"](),
        Compute.from_seconds(32 / images_per_second, samples=32),
        HARDWARE["p100-50gbit"],
        algorithm="halving_doubling",
        bucket_bytes=1,
        first_bucket_bytes=1,
        jitter=Jitter(JITTER),
    )
    many, few = predict_step(training, devices), predict_step(training, 8)
    return many.efficiency / few.efficiency


def _torchtitan() -> float:
    """Tokens a second per GPU on 128, over those on 8: all sharded, batch 2."""
    tokens = 2 * 8192
    training = Training(
        MODELS["llama-3-8b"](),
        Compute.from_seconds(tokens / 5762, samples=tokens),
        HARDWARE["h100-8x400gbit"],
        algorithm="ring",
        gather_parts=True,
        jitter=Jitter(JITTER),
    )
    return predict_step(training, 128).efficiency / predict_step(training, 8).efficiency


def _llama(data_replicas: int, micro_batches: int) -> float:
    """Model FLOPs over peak FLOPs: 8 GPUs share a layer, 16 stages of 8 parts.

    tfdp itself is data-parallel only. For P stages of V parts each, m micro-batches a
    step, and T devices that share a layer:

        bubble of a pipeline   (P - 1) / (V m)    of the time of m micro-batches
        split of a layer       8 gathers or scatters of its activations, of T devices

    Sources: Narayanan et al. 2021, section 2.2 (interleaved schedule); Korthikanti et
    al. 2022 (a gather and a scatter around attention and around the feed-forward layer,
    forward and backward).
    """
    machine, model = HARDWARE["h100-8x400gbit"], MODELS["llama-3-405b"]()
    split, layers, stages, parts, tokens, width = 8, 126, 16, 8, 8192, 16384
    step_flops = 3 * model.forward_flops_per_sample * tokens * micro_batches
    of_a_device = step_flops / (split * stages)
    computing = of_a_device / (machine.flops_per_second or 1.0)
    within = machine.within_host
    sent = 2 * tokens * width * (split - 1) / split / within.rate
    hops = (split - 1) * within.latency_seconds
    splitting = 8 * (sent + hops + machine.launch_seconds)
    # One layer in each part: 128 places for 126 layers, embedding and head.
    busy = computing + micro_batches * layers / stages * splitting
    busy *= 1 + (stages - 1) / (parts * micro_batches)
    busy *= 1 + JITTER * expected_maximum(data_replicas * split * stages)
    # Once a step each device gathers weights in 2 bytes and scatters gradients in
    # 4, over its own card; only the first and the last part are exposed, of 8.
    weights = model.gradient_bytes / 2 / (split * stages)
    card = machine.between_hosts.rate / machine.between_hosts.connections
    exposed = 6 * weights * (data_replicas - 1) / data_replicas / card / parts
    return of_a_device / (busy + exposed) / 989e12


GOYAL = "Goyal et al. 2017, abstract and figure 8; 29 hours on 8 GPUs: NVIDIA's report"
HOROVOD = (
    "Sergeev and Del Balso 2018; horovod docs/benchmarks.rst; one P100: tensorflow.org "
    "benchmarks of May 2017, batch 64"
)
TORCHTITAN = "Liang et al. 2024 (torchtitan), docs/performance.md, tables 1 and 3"
LLAMA = "Llama Team 2024, table 4"
AGAINST_1, AGAINST_8 = "efficiency against 1 GPU", "efficiency against 8 GPUs"
OF_PEAK = "model FLOPs of the peak"
# 219 and 91.8 images/s for 7.7 and 22.6 GFLOPs; ResNet-101 has 15.2.
RESNET101 = f"{HOROVOD}, between ResNet-50 and 152 by FLOPs"
_INCEPTION = partial(_horovod, "inception-v3", 142.0)
_RESNET101 = partial(_horovod, "resnet101", 129.5)
_VGG16 = partial(_horovod, "vgg16", 154.0)
_8K, _16K = partial(_llama, 64, 32), partial(_llama, 128, 16)

POINTS = (
    Point("ResNet-50, 8 -> 256 P100", GOYAL, AGAINST_8, 0.90, partial(_goyal, 256)),
    Point("ResNet-50, 8 -> 352 P100", GOYAL, AGAINST_8, 0.90, partial(_goyal, 352)),
    Point("Inception V3, 512 P100", HOROVOD, AGAINST_1, 0.90, _INCEPTION, True),
    Point("ResNet-101, 512 P100", RESNET101, AGAINST_1, 0.90, _RESNET101),
    Point("VGG-16, 512 P100", HOROVOD, AGAINST_1, 0.68, _VGG16),
    Point(
        "Llama 3.1 8B, 8 -> 128 H100",
        TORCHTITAN,
        "tokens/s per GPU against 8",
        5605 / 5762,
        _torchtitan,
    ),
    # Too fast: devices only multiply matrices, at the speed of one library benchmark.
    # Norms, softmax, transfers between stages, unequal stages and the power limit are
    # left out.
    Point("Llama 3 405B, 8,192 H100", LLAMA, OF_PEAK, 0.43, _8K),
    Point("Llama 3 405B, 16,384 H100", LLAMA, OF_PEAK, 0.41, _16K),
    Point(
        "Llama 3 405B, 16,384 against 8,192 H100",
        LLAMA,
        "ratio of the two",
        0.41 / 0.43,
        lambda: _16K() / _8K(),
    ),
)
