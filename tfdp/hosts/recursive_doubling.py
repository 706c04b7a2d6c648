"""Exchanges in ceil(log2 p) rounds, for data too short for a ring.

Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient Algorithms for All-to-All
Communications in Multiport Message-Passing Systems" (1997): in round k each worker
sends to the one 2^k ranks after it and receives from the one 2^k ranks before it, for
any number of workers.

Arithmetic and order, no sockets. `ends` holds the connections by distance 1, 2, 4 ...
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from tfdp.errors import CollectiveError
from tfdp.hosts.ring import Arrays, part_edges

LENGTH_BYTES = 8
# Up to this size parts are joined and sent at once; above, the copy costs more.
MOST_JOINED_BYTES = 1 << 16
# Largest allocation for an announced size before data arrives.
MOST_AT_ONCE_BYTES = 1 << 20
FRESH = functools.partial(np.empty, dtype=np.uint8)


class DistanceLinks(Protocol):
    """The connections to the worker at one distance after, and from the one before."""

    def send(self, data: np.ndarray | bytes | memoryview) -> None:
        """Queues data; it must not change afterwards."""

    def fill(self, array: np.ndarray) -> None:
        """Fills an array with received data."""

    def take(self, size_bytes: int) -> bytearray:
        """Returns the next `size_bytes` received bytes."""


def gather_rows(
    rows: np.ndarray, ends: Sequence[DistanceLinks], begun: bool = False
) -> None:
    """Fills contiguous `rows`: row d from d ranks before. `begun`: row 0 was sent."""
    held = 1
    for end in ends:
        count = min(held, len(rows) - held)
        if held > 1 or not begun:
            end.send(rows[:count])
        end.fill(rows[held : held + count])
        held += count


def leaving(workers: int, distance: int) -> list[int]:
    """The rows that travel `distance` ranks: those with that bit set."""
    return [row for row in range(workers) if row & distance]


def swap_rows(
    rows: np.ndarray, ends: Sequence[DistanceLinks], begun: bool = False
) -> np.ndarray:
    """Sends row d to the worker d ranks after; returned row d is from d ranks before.

    Changes `rows`. `begun`: whether the first round's data, odd rows, was sent already.
    """
    for bit, end in enumerate(ends):
        places = leaving(len(rows), 1 << bit)
        if bit > 0 or not begun:
            end.send(rows[places])
        received = np.empty((len(places), *rows.shape[1:]), rows.dtype)
        end.fill(received)
        rows[places] = received
    return rows


def gather_blobs(
    blob: bytes | np.ndarray,
    rank: int,
    workers: int,
    most_bytes: int,
    ends: Sequence[DistanceLinks],
    room: Callable[[int], np.ndarray] = FRESH,
) -> list[memoryview]:
    """All workers' bytes (of arrays, uint8), by rank; their lengths may differ.

    If one exceeds `most_bytes`, raises CollectiveError before memory is allocated.
    `room` allocates memory for received bytes, if not much more than this worker's.
    """
    _check_size(len(blob), rank, most_bytes)
    own = blob.data if isinstance(blob, np.ndarray) else memoryview(blob)
    held = [own]  # by distance before this worker
    at_once = max(MOST_AT_ONCE_BYTES, workers * len(blob))
    for end in ends:
        count = min(len(held), workers - len(held))
        lengths = struct.Struct(f"<{count}Q")
        sizes = list(map(len, held[:count]))
        parts: list[bytes | memoryview] = [lengths.pack(*sizes), *held[:count]]
        for part in parts if sum(sizes) > MOST_JOINED_BYTES else [b"".join(parts)]:
            end.send(part)
        coming = lengths.unpack(end.take(count * LENGTH_BYTES))
        first = len(held)
        for place, size in enumerate(coming, start=first):
            _check_size(size, (rank - place) % workers, most_bytes)
        received = _taken(end, sum(coming), room if sum(coming) <= at_once else None)
        for size in coming:
            held.append(received[:size])
            received = received[size:]
    return [held[(rank - other) % workers] for other in range(workers)]


def _taken(
    end: DistanceLinks, size_bytes: int, room: Callable[[int], np.ndarray] | None
) -> memoryview:
    """The next bytes from `end`; without `room` memory grows as they arrive."""
    if room is None:
        return memoryview(end.take(size_bytes))
    memory = room(size_bytes)
    end.fill(memory)
    return memory.data


def _check_size(size: int, rank: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise CollectiveError(
            f"Worker {rank} brings {size} bytes to a gather to which each worker may "
            f"bring {most_bytes} at most. Gather less at a time; if it is not so much, "
            "see that all workers run the same program and the same tfdp."
        )


# Small sums. "gather": each worker gets all numbers and adds them. "doubling": worker q
# gets and adds part q, then all gather the sums. Both add as a ring does, part q from
# worker q on, so that every way gives the same bits.

# Up to this size one slow call for all numbers beats one call per row.
MOST_ACCUMULATED = 1 << 13


class SmallSum:
    """One sum of flat arrays (one dtype, not changed) by `way`: "gather" or "doubling".

    `first` is the first round's data; it may be sent before fingerprints are compared.
    """

    def __init__(self, way: str, inputs: Arrays, rank: int, workers: int):
        self._way, self._rank, self._workers = way, rank, workers
        self._flat = inputs[0] if len(inputs) == 1 else np.concatenate(inputs)
        if way == "gather":
            self._rows = np.empty((workers, self._flat.size), self._flat.dtype)
            self._rows[0] = self._flat
            self.first = self._rows[:1]
        else:
            # Parts differ by at most one number; the padding is dropped.
            longest = -(-self._flat.size // workers)
            self._rows = np.zeros((workers, longest), self._flat.dtype)
            for part, start, stop in self._parts():
                row = (part - rank) % workers  # for the worker at that distance
                self._rows[row, : stop - start] = self._flat[start:stop]
            self.first = self._rows[leaving(workers, 1)]

    def _parts(self) -> Iterator[tuple[int, int, int]]:
        edges = part_edges(self._flat.size, self._workers)
        return zip(range(self._workers), edges[:-1], edges[1:], strict=True)

    def run(self, outputs: Arrays, ends: Sequence[DistanceLinks]) -> None:
        """Writes the sums into flat `outputs`; `first` must have been sent."""
        # Loss scaling looks for infinities; a warning for each would bury other output.
        with np.errstate(over="ignore", invalid="ignore"):
            total = (self._gathered if self._way == "gather" else self._doubled)(ends)
        start = 0
        for output in outputs:
            output[...] = total[start : start + output.size]
            start += output.size

    def _gathered(self, ends: Sequence[DistanceLinks]) -> np.ndarray:
        gather_rows(self._rows, ends, begun=True)
        order = order_of_adding(self._flat.size, self._rank, self._workers)
        return added(self._rows.reshape(-1)[order])

    def _doubled(self, ends: Sequence[DistanceLinks]) -> np.ndarray:
        received = swap_rows(self._rows, ends, begun=True)
        # Row d is from d ranks before: the next worker's is the last row.
        rows = np.empty_like(received)
        rows[0] = added(np.concatenate([received[:1], received[:0:-1]]))
        gather_rows(rows, ends)
        sums = np.empty_like(self._flat)
        for part, start, stop in self._parts():
            row = (self._rank - part) % self._workers  # from that distance before
            sums[start:stop] = rows[row, : stop - start]
        return sums


def added(rows: np.ndarray) -> np.ndarray:
    """The sum of the rows in order; NumPy's `sum` may add pairwise."""
    if rows.size <= MOST_ACCUMULATED:
        return np.add.accumulate(rows, axis=0, dtype=rows.dtype)[-1]
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total


@functools.lru_cache(maxsize=8)
def order_of_adding(size: int, rank: int, workers: int) -> np.ndarray:
    """Flat indices [workers, size] of the numbers to add, in order of addition.

    They index rows of `size` numbers by distance: own, worker before, and so on.

    >>> order_of_adding(4, rank=1, workers=2)
    array([[4, 5, 2, 3],
           [0, 1, 6, 7]])
    """
    starts = part_edges(size, workers)[1:]
    parts = np.searchsorted(starts, np.arange(size), side="right")
    sources = parts + np.arange(workers)[:, np.newaxis]
    return (rank - sources) % workers * size + np.arange(size)
