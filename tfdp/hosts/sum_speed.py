"""How fast sums between hosts are: a latency and a rate, from sums of two sizes."""

from __future__ import annotations

import statistics
import time

import numpy as np

from tfdp.hosts.host_link import HostLink
from tfdp.plan.sum_ways import LinkSpeed

__all__ = ["speed_of_sums"]

SMALL_BYTES, LARGE_BYTES, REPEATS = 4096, 4 << 20, 3
# Of a clock that did not move.
LEAST_SECONDS = 1e-6


def speed_of_sums(link: HostLink) -> LinkSpeed:
    """What this host sees; others see nearly the same. All hosts must ask.

    Args:
      link: to the other hosts, at least one.

    Cost: three sums of 4 MiB and three small ones.
    """
    seconds = {}
    for size_bytes in (SMALL_BYTES, LARGE_BYTES):
        times = []
        for _ in range(REPEATS):
            array = np.ones(size_bytes // 4, np.float32)
            start = time.perf_counter()
            link.sum([array], "speed of sums", "host")
            times.append(time.perf_counter() - start)
        seconds[size_bytes] = statistics.median(times)
    hops = link.workers - 1
    moved = 2 * hops / link.workers * (LARGE_BYTES - SMALL_BYTES)
    longer = seconds[LARGE_BYTES] - seconds[SMALL_BYTES]
    return LinkSpeed(
        max(seconds[SMALL_BYTES] / (2 * hops), LEAST_SECONDS),
        moved / max(longer, LEAST_SECONDS),
    )
