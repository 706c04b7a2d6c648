"""Measures a link's latency and rate while all workers use it.

As in a sum, each worker sends to each neighbor and waits for each: first little data,
then more. Workers that share cores delay each other here as in a sum.
"""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Sequence

import numpy as np

from tfdp.hosts.host_link import HostLink
from tfdp.hosts.messages import read_as
from tfdp.hosts.recursive_doubling import DistanceLinks, gather_blobs
from tfdp.plan.sum_ways import LinkSpeed

SHORT_BYTES, SHORT_REPEATS = 64, 5
LONG_BYTES, LONG_REPEATS = 1 << 16, 3
SPEED = struct.Struct("<dd")
# If the clock did not advance.
LEAST_SECONDS = 1e-7


def agreed_speed(ends: Sequence[DistanceLinks], rank: int, workers: int) -> LinkSpeed:
    """The medians of the workers' measurements, the same on all; or CollectiveError.

    Cost: 6 messages of 64 bytes and 4 of 64 KiB to each neighbor, and a gather.
    """
    own = _measured_speed(ends)
    blob = SPEED.pack(own.latency_seconds, own.bytes_per_second)
    blobs = gather_blobs(blob, rank, workers, SPEED.size, ends)
    return LinkSpeed.middle_of(
        [read_as(_speed, each, who, "speed") for who, each in enumerate(blobs)]
    )


def _speed(blob: bytes | memoryview) -> LinkSpeed:
    numbers = SPEED.unpack(blob)
    if not all(0 < number < float("inf") for number in numbers):
        raise ValueError("not two finite numbers above 0")
    return LinkSpeed(*numbers)


def _measured_speed(ends: Sequence[DistanceLinks]) -> LinkSpeed:
    short = _seconds_of_a_round(ends, SHORT_BYTES, SHORT_REPEATS)
    long = _seconds_of_a_round(ends, LONG_BYTES, LONG_REPEATS)
    # Includes the latency: on a fast link the rate is up to half too low, never absurd.
    return LinkSpeed(short, LONG_BYTES / long)


def _seconds_of_a_round(
    ends: Sequence[DistanceLinks], size_bytes: int, repeats: int
) -> float:
    sent, received = np.zeros((2, size_bytes), np.uint8)
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        for end in ends:
            end.send(sent)
            end.fill(received)
        seconds.append((time.perf_counter() - start) / len(ends))
    # The first round includes waiting for the workers that connected last.
    return max(statistics.median(seconds[1:]), LEAST_SECONDS)


SMALL_BYTES, LARGE_BYTES, REPEATS = 4096, 4 << 20, 3
LEAST_SUM_SECONDS = 1e-6


def speed_of_sums(link: HostLink) -> LinkSpeed:
    """This host's latency and rate of sums; a collective call on all hosts.

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
        max(seconds[SMALL_BYTES] / (2 * hops), LEAST_SUM_SECONDS),
        moved / max(longer, LEAST_SUM_SECONDS),
    )
