"""Chooses the algorithm of a sum over hosts by its rounds, bytes and cost.

    way        rounds             bytes that each worker sends, of n
    ring       2 (p - 1)          2 n (p - 1) / p, the least possible
    gather     ceil(log2 p)       n (p - 1)
    doubling   2 ceil(log2 p)     n (s + p - 1) / p, s the one-bits of 1 to p - 1

for any number p of workers. With the link's latency L and rate R a sum takes

    rounds L + bytes / R

where gathered bytes count twice and doubled ones three times, since they are packed and
unpacked as well. All three add in the same order: a link's measured speed must not
change any bit of a training.

Sources: Patarasuk and Yuan (2009) for the ring; Bruck, Ho, Kipnis, Upfal and Weathersby
(1997) for the exchanges in ceil(log2 p) rounds; Hockney (1994) for the cost of a round.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

WAYS = ("ring", "gather", "doubling")
# The most bytes of all workers that one worker holds at once; a ring holds none.
MOST_BYTES_GATHERED_OF_ALL = 1 << 18
# Longer messages suit a ring, which adds a block while it receives the next one.
MOST_BYTES_GATHERED_OF_ONE = 1 << 16
MOST_DOUBLED_BYTES = 1 << 20
# Passes over the sent bytes, from arrays to arrays.
PASSES = {"ring": 1, "gather": 2, "doubling": 3}


@dataclasses.dataclass(frozen=True)
class LinkSpeed:
    """A link's measured latency and rate, both above 0, with all workers using it."""

    latency_seconds: float
    bytes_per_second: float

    @classmethod
    def middle_of(cls, measured: Sequence[LinkSpeed]) -> LinkSpeed:
        """The medians of all workers' measurements.

        >>> LinkSpeed.middle_of([LinkSpeed(3.0, 1.0), LinkSpeed(1.0, 5.0)])
        LinkSpeed(latency_seconds=1.0, bytes_per_second=1.0)
        """
        return cls(
            statistics.median_low([each.latency_seconds for each in measured]),
            statistics.median_low([each.bytes_per_second for each in measured]),
        )


def distances(workers: int) -> list[int]:
    """The distances to the workers that each one sends to: powers of 2 below `workers`.

    >>> distances(6)
    [1, 2, 4]
    """
    return [1 << bit for bit in range((workers - 1).bit_length())]


def rounds(way: str, workers: int) -> int:
    """How often a worker waits for another one in one sum.

    >>> [rounds(way, 64) for way in WAYS]
    [126, 6, 12]
    """
    doublings = len(distances(workers))
    counts = {"ring": 2 * (workers - 1), "gather": doublings, "doubling": 2 * doublings}
    return counts[way]


def sent_bytes(way: str, size_bytes: int, workers: int) -> float:
    """The bytes that each worker sends in a sum, without headers and padding.

    >>> [sent_bytes(way, 6400, 64) for way in WAYS]
    [12600.0, 403200.0, 25500.0]
    """
    if way == "gather":
        return float(size_bytes * (workers - 1))
    parts = 2 * (workers - 1)
    if way == "doubling":
        # A part with a target at distance d travels once for each one-bit of d.
        hops = sum(distance.bit_count() for distance in range(workers))
        parts = hops + workers - 1
    return size_bytes * parts / workers


class SumWays:
    """Chooses the way of each sum over `workers` (at least 2) workers.

    All workers choose equally, because they have the same `speed`.
    """

    def __init__(self, workers: int, speed: LinkSpeed):
        self._workers = workers
        self._speed = speed
        #: A fixed way instead, one of WAYS; for tests and benchmarks.
        self.always: str | None = None

    def choose(self, size_bytes: int) -> str:
        """The fastest allowed way of a sum of `size_bytes`.

        >>> ways = SumWays(64, LinkSpeed(latency_seconds=1e-4, bytes_per_second=1e9))
        >>> [ways.choose(size) for size in (8, 10**5, 10**7)]
        ['gather', 'doubling', 'ring']
        """
        if self.always is not None:
            return self.always
        allowed = ["ring"]
        if size_bytes <= MOST_DOUBLED_BYTES:
            allowed.append("doubling")
        is_short = size_bytes <= MOST_BYTES_GATHERED_OF_ONE
        if is_short and size_bytes * self._workers <= MOST_BYTES_GATHERED_OF_ALL:
            allowed.append("gather")
        return min(allowed, key=lambda way: self.seconds(way, size_bytes))

    def seconds(self, way: str, size_bytes: int) -> float:
        """The expected duration of a sum."""
        sending = PASSES[way] * sent_bytes(way, size_bytes, self._workers)
        return (
            rounds(way, self._workers) * self._speed.latency_seconds
            + sending / self._speed.bytes_per_second
        )
