"""Runs that others published, and what the simulator says of them.

Each point is made of the paper's own hardware, model and settings, and of constants
that are the same for all. One of them was fitted, JITTER, to one figure (Horovod's
Inception V3, where the sums hide behind backprop), and then left alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tfdp.tools.simulator.failures import Jitter, expected_maximum
from tfdp.tools.simulator.known import HARDWARE, MODELS
from tfdp.tools.simulator.machine import Link, whole
from tfdp.tools.simulator.model import Compute
from tfdp.tools.simulator.step import Training, predict_step

#: Standard deviation of a replica's step, as a share of it.
JITTER = 0.03
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Point:
    """A published figure.

    Args:
      name: of the run.
      source: authors, year, and where in the work.
      quantity: what the figure is.
      published: the figure.
      predict: the simulator's.
      is_fitted: whether JITTER was fitted to it.
      why_off: what a difference above a tenth comes from, as far as it is known.
    """

    name: str
    source: str
    quantity: str
    published: float
    predict: Callable[[], float]
    is_fitted: bool = False
    why_off: str = ""

    @property
    def error(self) -> float:
        """(predicted - published) / published."""
        return self.predict() / self.published - 1


def _horovod(model: str, images_per_second: float) -> Callable[[], float]:
    """Efficiency at 512 GPUs: batch 64, NCCL's ring over all, fusion of 64 MB.

    Horovod sends every 5 ms what is there, so that neither the first nor the last
    message is full: 1 MiB, as tfdp's.
    """

    def predict() -> float:
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

    return predict


def _goyal(devices: int) -> Callable[[], float]:
    """Samples a second per GPU, over those of 8: batch 32, each tensor on its own, sums
    within servers and halving and doubling between them."""

    def predict() -> float:
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

    return predict


def _torchtitan() -> float:
    """Tokens a second per GPU on 128, over those on 8: all in parts, batch 2."""
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


def _llama(data_replicas: int, micro_batches: int) -> Callable[[], float]:
    """Model FLOPs over the peak's: 8 GPUs share a layer, 16 stages of 8 parts."""

    def predict() -> float:
        machine, model = HARDWARE["h100-8x400gbit"], MODELS["llama-3-405b"]()
        split, layers, stages, tokens, width = 8, 126, 16, 8192, 16384
        step_flops = 3 * model.forward_flops_per_sample * tokens * micro_batches
        of_a_device = step_flops / (split * stages)
        computing = of_a_device / (machine.flops_per_second or 1.0)
        splitting = split_layer_seconds(
            2 * tokens * width, split, machine.within_host, machine.launch_seconds
        )
        # One layer in each part: 128 places for 126 layers, embedding and head.
        busy = computing + micro_batches * layers / stages * splitting
        busy *= 1 + Pipeline(stages, parts=8, micro_batches=micro_batches).bubble
        busy *= 1 + JITTER * expected_maximum(data_replicas * split * stages)
        # Weights are gathered in 2 bytes and gradients scattered in 4, by each device
        # over its own card, once a step; only the first and the last part are in the
        # open, of 8.
        weights = model.gradient_bytes / 2 / (split * stages)
        card = machine.between_hosts.rate / machine.between_hosts.connections
        exposed = 6 * weights * (data_replicas - 1) / data_replicas / card / 8
        return of_a_device / (busy + exposed) / 989e12

    return predict


HOROVOD = "Sergeev and Del Balso 2018; horovod docs/benchmarks.rst"
ONE_P100 = "one P100: tensorflow.org benchmarks of May 2017, batch 64"
GOYAL = "Goyal et al. 2017, abstract and figure 8; 29 hours on 8 GPUs: NVIDIA's report"
LLAMA = "Llama Team 2024, table 4"
LLAMA_WHY = (
    "a device is taken to do products of matrices only, at the speed of one library "
    "benchmark: norms, attention's softmax, transfers between stages, stages of "
    "unequal work and the limit of power are not in it"
)

POINTS = (
    Point(
        "ResNet-50, 8 -> 256 P100",
        GOYAL,
        "efficiency against 8 GPUs",
        0.90,
        _goyal(256),
    ),
    Point(
        "ResNet-50, 8 -> 352 P100",
        GOYAL,
        "efficiency against 8 GPUs",
        0.90,
        _goyal(352),
    ),
    Point(
        "Inception V3, 512 P100",
        f"{HOROVOD}; {ONE_P100}",
        "efficiency against 1 GPU",
        0.90,
        _horovod("inception-v3", 142.0),
        is_fitted=True,
    ),
    Point(
        "ResNet-101, 512 P100",
        f"{HOROVOD}; {ONE_P100}, between ResNet-50 and 152 by FLOPs",
        "efficiency against 1 GPU",
        0.90,
        # 219 and 91.8 images/s for 7.7 and 22.6 GFLOPs; ResNet-101 has 15.2.
        _horovod("resnet101", 129.5),
    ),
    Point(
        "VGG-16, 512 P100",
        f"{HOROVOD}; {ONE_P100}",
        "efficiency against 1 GPU",
        0.68,
        _horovod("vgg16", 154.0),
    ),
    Point(
        "Llama 3.1 8B, 8 -> 128 H100",
        "Liang et al. 2024 (torchtitan), docs/performance.md, tables 1 and 3",
        "tokens/s per GPU against 8",
        5605 / 5762,
        _torchtitan,
    ),
    Point(
        "Llama 3 405B, 8,192 H100",
        LLAMA,
        "model FLOPs of the peak",
        0.43,
        _llama(data_replicas=64, micro_batches=32),
        why_off=LLAMA_WHY,
    ),
    Point(
        "Llama 3 405B, 16,384 H100",
        LLAMA,
        "model FLOPs of the peak",
        0.41,
        _llama(data_replicas=128, micro_batches=16),
        why_off=LLAMA_WHY,
    ),
    Point(
        "Llama 3 405B, 16,384 against 8,192 H100",
        LLAMA,
        "ratio of the two",
        0.41 / 0.43,
        lambda: _llama(128, 16)() / _llama(64, 32)(),
    ),
)


# What splitting a model over devices costs, for runs that tfdp does not do itself.
#
# tfdp is data-parallel. Published runs of very large models are not only that, so these
# formulas stand between a device's FLOPs and their figures:
#
#     bubble of a pipeline   (P - 1) / (V m)        of the time of m micro-batches
#     split of a layer       8 gathers or scatters of its activations, of T devices
#
# for P stages, each of V parts, and m micro-batches a step.
#
# Sources: Narayanan et al. 2021 (interleaved schedule, section 2.2); Korthikanti et al.
# 2022 (sequence parallelism: a gather and a scatter around attention and around the
# feed-forward layer, in forward and again in backward).


COLLECTIVES_OF_A_LAYER = 8


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Stages one behind the other.

    Args:
      stages: P, at least 1.
      parts: V, in which each stage is interleaved; at least 1.
      micro_batches: m, of a step; at least 1.
    """

    stages: int
    parts: int
    micro_batches: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            whole("Pipeline", field.name, getattr(self, field.name))

    @property
    def bubble(self) -> float:
        """Idle time, as a share of the time in which a device computes.

        >>> Pipeline(stages=16, parts=8, micro_batches=16).bubble
        0.1171875
        """
        return (self.stages - 1) / (self.parts * self.micro_batches)


def split_layer_seconds(
    activation_bytes: float, devices: int, within_host: Link, launch_seconds: float
) -> float:
    """What a layer of a micro-batch, forward and backward, exchanges within a host.

    Args:
      activation_bytes: tokens of the micro-batch, times width, times bytes of a number.
      devices: that share the layer.
      within_host: what joins them.
      launch_seconds: before each exchange.
    """
    whole("split_layer_seconds", "devices", devices)
    if devices == 1:
        return 0.0
    sent = activation_bytes * (devices - 1) / devices / within_host.rate
    hops = (devices - 1) * within_host.latency_seconds
    return COLLECTIVES_OF_A_LAYER * (sent + hops + launch_seconds)
