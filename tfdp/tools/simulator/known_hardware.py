"""Hardware that papers and makers describe, each number with its source.

Latencies are those by which NCCL plans, for all GPUs alike (github.com/NVIDIA/nccl,
src/graph/tuning.cc: a hop of a ring by the protocol Simple 3.4 us over NVLink, 5.7 us
over PCIe, 14.0 us over a network, 8.4 us before the first). So is the part of a link's
rate that a sum gets, 0.92.
"""

from __future__ import annotations

from tfdp.tools.simulator.machine import Link, Machine

__all__ = ["HARDWARE", "LINK_REACHED"]

NVLINK_SECONDS, PCIE_SECONDS, NETWORK_SECONDS = 3.4e-6, 5.7e-6, 14.0e-6
LAUNCH_SECONDS = 8.4e-6
#: Of a link's rate, for every link here.
LINK_REACHED = 0.92
#: Of the peak of bfloat16 products, for the devices that are given in FLOPs: 716 of 989
#: TFLOP/s by cuBLAS, 8192 x 8192 x 8192 on an H100 SXM (Shankhdhar 2024, "Outperforming
#: cuBLAS on H100"). What is no product of matrices is not in it.
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
