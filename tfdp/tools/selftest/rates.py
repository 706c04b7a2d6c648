"""Times sums of some sizes."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import tensorflow as tf

from tfdp import DataParallelStrategy
from tfdp.tools.measuring.in_turn import time_in_turn
from tfdp.tools.measuring.sums import make_gradients, make_reduction

SIZES_BYTES = tuple(n << 20 for n in (1, 16, 128))
REPEATS, CALLS, WARM_UP = 7, 3, 2


def measure_rates(strategy: DataParallelStrategy) -> str:
    """Times sums of float32 tensors that are on the devices.

    For each size: the median time, and the bus bandwidth as NCCL's tests define it,
    2 (N - 1) / N of the bytes, divided by that time.
    """
    devices = strategy.extended.worker_devices
    arms: dict[str, Callable[[], object]] = {}
    for size_bytes in SIZES_BYTES:
        shapes = [(size_bytes // 4,)]
        gradients = [make_gradients(shapes, r, d) for r, d in enumerate(devices)]
        arms[str(size_bytes)] = make_reduction(strategy, gradients, read=True)
        for _ in range(WARM_UP):
            arms[str(size_bytes)]()
    seconds = time_in_turn(
        arms, repeats=REPEATS, calls=CALLS, finish=tf.test.experimental.sync_devices
    )
    share = 2 * (len(devices) - 1) / len(devices)
    lines = []
    for size, figures in seconds.items():
        median = statistics.median(figures)
        rate = share * int(size) / median / 1e9
        lines.append(f"{int(size) >> 20} MiB {1e3 * median:.3g} ms ({rate:.3g} GB/s)")
    return ", ".join(lines)
