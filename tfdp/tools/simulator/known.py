"""Hardware and models from papers and data sheets, each number with its source.

Latencies are those of NCCL's planning for every GPU (github.com/NVIDIA/nccl,
src/graph/tuning.cc: a hop of a ring by the protocol Simple 3.4 us over NVLink, 5.7 us
over PCIe, 14.0 us over a network, 8.4 us before the first), as is the share of a link's
rate that a sum achieves, 0.92.
"""

from __future__ import annotations

from collections.abc import Callable

from tfdp.tools.simulator.machine import Link, Machine
from tfdp.tools.simulator.model import GradientSize, ModelProfile

NVLINK_SECONDS, PCIE_SECONDS, NETWORK_SECONDS = 3.4e-6, 5.7e-6, 14.0e-6
LAUNCH_SECONDS = 8.4e-6
LINK_REACHED = 0.92
#: Share of peak bfloat16 FLOPs: 716 of 989 TFLOP/s by cuBLAS, 8192 x 8192 x 8192 on an
#: H100 SXM (Shankhdhar 2024, "Outperforming cuBLAS on H100"); matrix products only.
PRODUCTS_REACHED = 0.72
GBIT = 1e9 / 8


def _machine(
    name: str,
    devices_per_host: int,
    within: tuple[float, float],
    gbit: float,
    source: str,
    *,
    cards: int = 1,
    peak_flops: float | None = None,
) -> Machine:
    seconds, rate = within
    reached = peak_flops * PRODUCTS_REACHED if peak_flops else None
    return Machine(
        name,
        devices_per_host,
        Link(seconds, rate, reached=LINK_REACHED),
        Link(NETWORK_SECONDS, gbit * GBIT, connections=cards, reached=LINK_REACHED),
        flops_per_second=reached,
        launch_seconds=LAUNCH_SECONDS,
        source=source,
    )


_ROWS = (
    _machine(
        "p100-25gbit",
        4,
        (PCIE_SECONDS, 15.75e9),
        25,
        "Horovod's 128 servers: 4 Pascal GPUs, RoCE of 25 Gbit/s (horovod "
        "docs/benchmarks.rst); PCIe 3.0 x16: 15.75 GB/s each way (PCI-SIG)",
    ),
    _machine(
        "p100-50gbit",
        8,
        (NVLINK_SECONDS, 80e9),
        50,
        "Goyal et al. 2017, section 4: Big Basin, 8 P100 with NVLink, Ethernet of 50 "
        "Gbit/s; NVLink 1: 4 links of 20 GB/s each way (NVIDIA, P100 whitepaper)",
    ),
    _machine(
        "v100-100gbit",
        8,
        (NVLINK_SECONDS, 150e9),
        100,
        "8 V100 with NVLink 2: 6 links of 25 GB/s each way; 125 TFLOP/s (NVIDIA, V100 "
        "data sheet); a network of 100 Gbit/s",
        peak_flops=125e12,
    ),
    _machine(
        "a100-8x200gbit",
        8,
        (NVLINK_SECONDS, 300e9),
        200,
        "8 A100 with NVLink 3: 12 links of 25 GB/s each way; 312 TFLOP/s; 8 cards of "
        "200 Gbit/s (NVIDIA, DGX A100 data sheet)",
        cards=8,
        peak_flops=312e12,
    ),
    _machine(
        "h100-8x400gbit",
        8,
        (NVLINK_SECONDS, 450e9),
        400,
        "8 H100 with NVLink 4: 18 links of 25 GB/s each way; 989 TFLOP/s (NVIDIA, H100 "
        "data sheet); 400 Gbit/s for each GPU (Llama Team 2024, section 3.3.1; "
        "torchtitan, docs/performance.md)",
        cards=8,
        peak_flops=989e12,
    ),
)

HARDWARE = {machine.name: machine for machine in _ROWS}


# Models, layer by layer from the papers: a k x k convolution from c to d channels has
# 2 k k c d s s FLOPs a sample on s x s positions, a dense layer 2 c d. The numbers of
# weights are those of Keras' models.
FLOAT32 = 4
Layers = list[GradientSize]


def _dense(inputs: int, outputs: int, size: int = FLOAT32) -> Layers:
    work = 2.0 * inputs * outputs
    return [
        GradientSize(size * inputs * outputs, work),
        GradientSize(size * outputs, 0.0),
    ]


def _convolution(
    height: int, width: int, inputs: int, outputs: int, side: int, vectors: int
) -> Layers:
    """A kernel and `vectors` further weights: biases, scales and shifts."""
    weights = height * width * inputs * outputs
    kernel = GradientSize(FLOAT32 * weights, 2.0 * weights * side * side)
    return [kernel, *[GradientSize(FLOAT32 * outputs, 0.0)] * vectors]


def _profile(name: str, layers: Layers) -> ModelProfile:
    return ModelProfile(name, tuple(layers), sum(layer.work for layer in layers))


def _resnet(name: str, blocks: tuple[int, int, int, int]) -> ModelProfile:
    """He et al. 2016, as Keras: convolutions with bias, normalization with scale."""
    layers = _convolution(7, 7, 3, 64, 112, vectors=3)
    channels = 64
    for count, width, side in zip(
        blocks, (64, 128, 256, 512), (56, 28, 14, 7), strict=True
    ):
        for block in range(count):
            if block == 0:
                layers += _convolution(1, 1, channels, 4 * width, side, vectors=3)
            layers += _convolution(1, 1, channels, width, side, vectors=3)
            layers += _convolution(3, 3, width, width, side, vectors=3)
            layers += _convolution(1, 1, width, 4 * width, side, vectors=3)
            channels = 4 * width
    return _profile(name, layers + _dense(channels, 1000))


def _vgg16() -> ModelProfile:
    """Simonyan and Zisserman 2015, configuration D."""
    layers: Layers = []
    channels = 3
    for count, width, side in zip(
        (2, 2, 3, 3, 3), (64, 128, 256, 512, 512), (224, 112, 56, 28, 14), strict=True
    ):
        for _ in range(count):
            layers += _convolution(3, 3, channels, width, side, vectors=1)
            channels = width
    layers += _dense(7 * 7 * 512, 4096) + _dense(4096, 4096) + _dense(4096, 1000)
    return _profile("vgg16", layers)


# Inception V3's branches as (height, width, outputs) one after the other.
Branch = tuple[tuple[int, int, int], ...]


def _inception_blocks() -> list[tuple[int, int, tuple[Branch, ...]]]:
    """(inputs, side, branches) of the mixed blocks that keep their side."""

    def small(pooled: int) -> tuple[Branch, ...]:
        return (
            ((1, 1, 64),),
            ((1, 1, 48), (5, 5, 64)),
            ((1, 1, 64), (3, 3, 96), (3, 3, 96)),
            ((1, 1, pooled),),
        )

    def middle(width: int) -> tuple[Branch, ...]:
        return (
            ((1, 1, 192),),
            ((1, 1, width), (1, 7, width), (7, 1, 192)),
            ((1, 1, width), (7, 1, width), (1, 7, width), (7, 1, width), (1, 7, 192)),
            ((1, 1, 192),),
        )

    wide: tuple[Branch, ...] = (
        ((1, 1, 320),),
        ((1, 1, 384),),
        ((1, 1, 448), (3, 3, 384)),
        ((1, 1, 192),),
    )
    return [
        (192, 35, small(32)),
        (256, 35, small(64)),
        (288, 35, small(64)),
        (768, 17, middle(128)),
        (768, 17, middle(160)),
        (768, 17, middle(160)),
        (768, 17, middle(192)),
        (1280, 8, wide),
        (2048, 8, wide),
    ]


def _inception_v3() -> ModelProfile:
    """Szegedy et al. 2016, without the auxiliary head; normalization shifts only."""

    def chain(inputs: int, side: int, branch: Branch) -> Layers:
        found: Layers = []
        for height, width, outputs in branch:
            found += _convolution(height, width, inputs, outputs, side, vectors=1)
            inputs = outputs
        return found

    layers: Layers = []
    stem = ((3, 3, 3, 32, 149), (3, 3, 32, 32, 147), (3, 3, 32, 64, 147))
    for shape in (*stem, (1, 1, 64, 80, 73), (3, 3, 80, 192, 71)):
        layers += _convolution(*shape, vectors=1)
    for number, (inputs, side, branches) in enumerate(_inception_blocks()):
        if number == 3:  # 35 places become 17
            layers += chain(288, 17, ((3, 3, 384),))
            layers += chain(288, 35, ((1, 1, 64), (3, 3, 96)))
            layers += chain(96, 17, ((3, 3, 96),))
        if number == 7:  # 17 become 8
            layers += chain(768, 17, ((1, 1, 192),)) + chain(192, 8, ((3, 3, 320),))
            layers += chain(768, 17, ((1, 1, 192), (1, 7, 192), (7, 1, 192)))
            layers += chain(192, 8, ((3, 3, 192),))
        for branch in branches:
            layers += chain(inputs, side, branch)
        if side == 8:  # two branches end in parallel 1 x 3 and 3 x 1
            for _ in range(2):
                layers += chain(384, side, ((1, 3, 384),))
                layers += chain(384, side, ((3, 1, 384),))
    return _profile("inception-v3", layers + _dense(2048, 1000))


def _bert_base() -> ModelProfile:
    """Devlin et al. 2018; a sample is a sequence of 128 tokens."""
    tokens, width = 128, 768
    layers: Layers = [
        GradientSize(FLOAT32 * rows * width, 0.0) for rows in (30522, 512, 2, 1, 1)
    ]
    for _ in range(12):
        for inputs, outputs in [(width, width)] * 4 + [(width, 3072), (3072, width)]:
            kernel, bias = _dense(inputs, outputs)
            layers += [GradientSize(kernel.size_bytes, tokens * kernel.work), bias]
        layers += [GradientSize(FLOAT32 * width, 0.0)] * 4
    return _profile("bert-base", layers + _dense(width, width))


def _llama_3(name: str, layers: int, width: int, feed_forward: int) -> ModelProfile:
    """A decoder with gated feed-forward layers; a sample is one token of 8,192."""
    # Gradients are sent in 2 bytes; keys and values have 1,024 numbers each.
    vocabulary, size = 128256 * width, 2
    attention = 2 * width * width + 2 * width * 1024
    gated = 3 * width * feed_forward
    scores = 2.0 * width * 8192  # 2 products of 2 FLOPs, half of the sequence
    block = [
        GradientSize(size * attention, 2.0 * attention + scores),
        GradientSize(size * gated, 2.0 * gated),
        GradientSize(size * 2 * width, 0.0),
    ]
    embedding = GradientSize(size * vocabulary, 0.0)
    head = GradientSize(size * vocabulary, 2.0 * vocabulary)
    return _profile(name, [embedding, *block * layers, head])


# Name -> a function that makes the profile.
MODELS: dict[str, Callable[[], ModelProfile]] = {
    "resnet50": lambda: _resnet("resnet50", (3, 4, 6, 3)),
    "resnet101": lambda: _resnet("resnet101", (3, 4, 23, 3)),
    "inception-v3": _inception_v3,
    "vgg16": _vgg16,
    "bert-base": _bert_base,
    "llama-3-8b": lambda: _llama_3("llama-3-8b", 32, 4096, 14336),
    "llama-3-405b": lambda: _llama_3("llama-3-405b", 126, 16384, 53248),
}
