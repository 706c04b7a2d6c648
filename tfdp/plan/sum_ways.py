"""Which way a sum over hosts takes: how many rounds, how many bytes, at what cost.

    way        rounds             bytes that each worker sends, of n
    ring       2 (p - 1)          2 n (p - 1) / p, the least possible
    gather     ceil(log2 p)       n (p - 1)
    doubling   2 ceil(log2 p)     n (s + p - 1) / p, s the one-bits of 1 to p - 1

for p workers, any number of them. With a latency L and a rate R of the link a sum takes

    rounds L + bytes / R

where the bytes of a gather count twice and those of a doubling three times, since they
are packed and unpacked as well. All three add in the same order, so that the choice
changes no bit of a training: how fast a link was on a day must not.

Sources: Patarasuk and Yuan (2009) for the ring; Bruck, Ho, Kipnis, Upfal and Weathersby
(1997) for the exchanges in ceil(log2 p) rounds; the cost of a round is that of Hockney
(1994).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

WAYS = ("ring", "gather", "doubling")
# What a worker holds of all others at once; a ring holds nothing.
MOST_BYTES_GATHERED_OF_ALL = 1 << 18
# Of everything longer a ring adds a block while the next one comes.
MOST_BYTES_GATHERED_OF_ONE = 1 << 16
MOST_DOUBLED_BYTES = 1 << 20
# How often what travels is touched, on the way from arrays to arrays.
PASSES = {"ring": 1, "gather": 2, "doubling": 3}


@dataclasses.dataclass(frozen=True)
class LinkSpeed:
    """What was measured of a link, while all workers used it at once.

    Args:
      latency_seconds: until a short message is there, above 0.
      bytes_per_second: of long ones, above 0.
    """

    latency_seconds: float
    bytes_per_second: float

    @classmethod
    def middle_of(cls, measured: Sequence[LinkSpeed]) -> LinkSpeed:
        """The medians of what the workers have measured.

        >>> LinkSpeed.middle_of([LinkSpeed(3.0, 1.0), LinkSpeed(1.0, 5.0)])
        LinkSpeed(latency_seconds=1.0, bytes_per_second=1.0)
        """
        return cls(
            statistics.median_low([each.latency_seconds for each in measured]),
            statistics.median_low([each.bytes_per_second for each in measured]),
        )


def distances(workers: int) -> list[int]:
    """How far the workers are that each one sends to: the powers of 2 below `workers`.

    >>> distances(6)
    [1, 2, 4]
    """
    return [1 << bit for bit in range((workers - 1).bit_length())]


def rounds(way: str, workers: int) -> int:
    """How often a worker waits for another one, in one sum.

    >>> [rounds(way, 64) for way in WAYS]
    [126, 6, 12]
    """
    doublings = len(distances(workers))
    return {"ring": 2 * (workers - 1), "gather": doublings, "doubling": 2 * doublings}[
        way
    ]


def sent_bytes(way: str, size_bytes: int, workers: int) -> float:
    """What each worker sends of a sum of so many bytes, headers and padding aside.

    >>> [sent_bytes(way, 6400, 64) for way in WAYS]
    [12600.0, 403200.0, 25500.0]
    """
    if way == "gather":
        return float(size_bytes * (workers - 1))
    parts = 2 * (workers - 1)
    if way == "doubling":
        # A part that goes d places travels once for each one-bit of d.
        hops = sum(distance.bit_count() for distance in range(workers))
        parts = hops + workers - 1
    return size_bytes * parts / workers


class SumWays:
    """Chooses the way of each sum; alike on all workers, which have the same numbers.

    Args:
      workers: p, at least 2.
      speed: of the link, the same on all workers.
    """

    def __init__(self, workers: int, speed: LinkSpeed):
        self._workers = workers
        self._speed = speed
        #: Asked for by name instead, one of WAYS; for tests and benchmarks.
        self.always: str | None = None

    def choose(self, size_bytes: int) -> str:
        """The way of a sum of `size_bytes`: of those that are allowed the fastest.

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
        """What a sum is expected to take."""
        sending = PASSES[way] * sent_bytes(way, size_bytes, self._workers)
        return (
            rounds(way, self._workers) * self._speed.latency_seconds
            + sending / self._speed.bytes_per_second
        )
