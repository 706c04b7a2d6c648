"""Latency and rate of a link from three sums. Pure.

Of one tensor of 4 MB, of one of 32 MB, and of 64 tensors of 64 KB, which are 4 MB in
several buckets. With t their times and b the buckets of each,

    bytes per second     work of (32 MB - 4 MB) / (t of 32 MB - t of 4 MB)
    seconds of a bucket  (t of 64 tensors - t of one) / (b of 64 - b of one)

What a call costs besides, from Python into TensorFlow and back, falls out of both.
"""

from __future__ import annotations

import dataclasses

from tfdp.plan.buckets import TensorInfo, plan_buckets
from tfdp.plan.communication import Communication
from tfdp.simulator.machine import Link

__all__ = ["LARGE", "MANY", "SMALL", "SUM_SETS", "SumTimes", "fit_link"]

#: Names of `gradient_sets.GRADIENT_SETS`, with their tensors and the bytes of each.
SMALL, MANY, LARGE = "equal-1x1m", "equal-64x16k", "equal-1x8m"
SUM_SETS = {SMALL: (1, 1 << 22), MANY: (64, 1 << 16), LARGE: (1, 1 << 25)}
LEAST_SECONDS = 1e-7


@dataclasses.dataclass(frozen=True)
class SumTimes:
    """Of one of the sets: seconds of a call, and those of a processor."""

    seconds: float
    processor_seconds: float


def bucket_count(name: str) -> int:
    """Buckets of a set, as tfdp plans them by default."""
    count, size_bytes = SUM_SETS[name]
    defaults = Communication()
    plan = plan_buckets(
        [TensorInfo(size_bytes, "float32")] * count,
        bucket_bytes=defaults.bucket_bytes,
        first_bucket_bytes=defaults.first_bucket_bytes,
    )
    return len(plan)


def fit_link(
    times: dict[str, SumTimes], bytes_of_work: float, rounds: int, cores: int
) -> Link:
    """A link that takes as long as was measured.

    Args:
      times: of each of SUM_SETS.
      bytes_of_work: for each byte of a sum what is moved, by the simulator's formula:
        replicas - 1 within a host, 2 (p - 1) / p between p processes.
      rounds: latencies of a sum by that formula.
      cores: that the processes may use together.
    """
    small, many, large = (times[name] for name in (SMALL, MANY, LARGE))
    more_bytes = SUM_SETS[LARGE][1] - SUM_SETS[SMALL][1]
    longer = max(large.seconds - small.seconds, LEAST_SECONDS)
    buckets = bucket_count(MANY) - bucket_count(SMALL)
    bucket_seconds = max((many.seconds - small.seconds) / buckets, LEAST_SECONDS)
    busy = (large.processor_seconds - small.processor_seconds) / longer / cores
    return Link(
        latency_seconds=bucket_seconds / rounds,
        bytes_per_second=bytes_of_work * more_bytes / longer,
        compute_share=min(max(busy, 0.0), 1.0),
    )
