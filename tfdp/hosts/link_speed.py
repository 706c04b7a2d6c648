"""How fast a link is while all workers use it: the latency and the rate.

Everybody sends to the worker after and receives from the one before, some short
messages and then some long ones. Workers that share cores slow each other down, and so
they will in a sum.
"""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Sequence

import numpy as np

from tfdp.hosts.doubling import End, gather_blobs
from tfdp.plan.sum_ways import LinkSpeed

__all__ = ["agreed_speed"]

SHORT_BYTES, SHORT_MESSAGES = 64, 9
LONG_BYTES, LONG_MESSAGES = 1 << 16, 5
SPEED = struct.Struct("<dd")
# Of a clock that did not move.
LEAST_SECONDS = 1e-7


def agreed_speed(ends: Sequence[End], rank: int, workers: int) -> LinkSpeed:
    """The medians of what the workers measure, all at once; the same on all of them.

    Args:
      ends: the connections to the neighbours, see `tfdp.hosts.doubling`.
      rank, workers: this worker; how many there are.

    Raises:
      ValueError: when what a worker says is no speed.

    Cost: 9 messages of 64 bytes, 5 of 64 KiB and a gather.
    """
    own = _measured_speed(ends[0])
    blob = SPEED.pack(own.latency_seconds, own.bytes_per_second)
    blobs = gather_blobs(blob, rank, workers, SPEED.size, ends)
    numbers = [SPEED.unpack(each) for each in blobs]
    if not all(0 < number < float("inf") for pair in numbers for number in pair):
        raise ValueError("what a worker has measured of the link is no speed")
    return LinkSpeed.middle_of([LinkSpeed(*pair) for pair in numbers])


def _measured_speed(ring: End) -> LinkSpeed:
    short = _middle_seconds(ring, SHORT_BYTES, SHORT_MESSAGES)
    long = _middle_seconds(ring, LONG_BYTES, LONG_MESSAGES)
    # With its latency: on a fast link the rate is too low by half, and never absurd.
    return LinkSpeed(short, LONG_BYTES / long)


def _middle_seconds(ring: End, size_bytes: int, messages: int) -> float:
    sent, came = np.zeros((2, size_bytes), np.uint8)
    seconds = []
    for _ in range(messages):
        start = time.perf_counter()
        ring.send(sent)
        ring.fill(came)
        seconds.append(time.perf_counter() - start)
    return max(statistics.median(seconds), LEAST_SECONDS)
