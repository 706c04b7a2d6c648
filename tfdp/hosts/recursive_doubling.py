"""Exchanges in ceil(log2 p) rounds: in each one twice as many workers have met.

Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient Algorithms for All-to-All
Communications in Multiport Message-Passing Systems" (1997): in round k everybody sends
to the worker 2^k places after, and receives from the one 2^k places before. That needs
no power of two, and p workers of ceil(log2 p) connections each.

Pure arithmetic and order, no sockets; `ends` are, for each distance 1, 2, 4 ..., what
sends to the worker so far after and what receives from the one so far before.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from tfdp.errors import CollectiveError
from tfdp.hosts.ring import part_edges

LENGTH_BYTES = 8
# So many bytes are sent in one piece; to put more together costs more than it saves.
MOST_JOINED_BYTES = 1 << 16
# What an announced size takes of memory before anything has come, from whoever.
MOST_AT_ONCE_BYTES = 1 << 20
FRESH = functools.partial(np.empty, dtype=np.uint8)


class End(Protocol):
    """The connections at one distance."""

    def send(self, data: np.ndarray | bytes | memoryview) -> None:
        """Queues data for the worker after; it must not change any more."""

    def fill(self, array: np.ndarray) -> None:
        """Fills an array with what comes from the worker before."""

    def take(self, size_bytes: int) -> bytearray:
        """The next bytes from it."""


def gather_rows(rows: np.ndarray, ends: Sequence[End], begun: bool = False) -> None:
    """Fills `rows` with everybody's: row d is that of the worker d places before.

    Args:
      rows: [workers, ...], contiguous; row 0 is this worker's own.
      ends: see above.
      begun: whether what the first round sends, row 0, has been sent already.
    """
    held = 1
    for end in ends:
        count = min(held, len(rows) - held)
        if held > 1 or not begun:
            end.send(rows[:count])
        end.fill(rows[held : held + count])
        held += count


def leaving(workers: int, distance: int) -> list[int]:
    """The rows that go `distance` places on: those whose way has that bit.

    >>> leaving(6, 2)
    [2, 3]
    """
    return [row for row in range(workers) if row & distance]


def swap_rows(rows: np.ndarray, ends: Sequence[End], begun: bool = False) -> np.ndarray:
    """Brings row d to the worker d places after; row d that returns is from d before.

    Args:
      rows: [workers, ...]; changed. Row 0 stays.
      ends: see above.
      begun: whether what the first round sends, every second row from the first on, has
        been sent already.
    """
    for bit, end in enumerate(ends):
        places = leaving(len(rows), 1 << bit)
        if bit > 0 or not begun:
            end.send(rows[places])
        came = np.empty((len(places), *rows.shape[1:]), rows.dtype)
        end.fill(came)
        rows[places] = came
    return rows


def gather_blobs(
    blob: bytes | np.ndarray,
    rank: int,
    workers: int,
    most_bytes: int,
    ends: Sequence[End],
    room: Callable[[int], np.ndarray] = FRESH,
) -> list[memoryview]:
    """The bytes of all workers, by rank; their lengths may differ.

    Args:
      blob: this worker's; of an array, of uint8.
      rank, workers: of this worker; how many there are.
      most_bytes: what each may bring, as all have agreed.
      ends: see above.
      room: for so many bytes that come, if they are not many more than this worker's.

    Raises:
      CollectiveError: when this worker brings more, or another one says that it does:
        before any memory is taken for it.
    """
    _check_size(len(blob), rank, most_bytes)
    own = blob.data if isinstance(blob, np.ndarray) else memoryview(blob)
    held = [own]  # by how many places before
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
        came = _taken(end, sum(coming), room if sum(coming) <= at_once else None)
        for size in coming:
            held.append(came[:size])
            came = came[size:]
    return [held[(rank - other) % workers] for other in range(workers)]


def _taken(
    end: End, size_bytes: int, room: Callable[[int], np.ndarray] | None
) -> memoryview:
    """The next bytes from `end`; without room memory is taken as they come."""
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


# Sums in few rounds, of what is too short for a ring to pay.
#
#     gather     everybody's numbers to everybody, who adds all of them
#     doubling   everybody's part q to worker q, who adds it; the sums to everybody
#
# Either adds as a ring does (`tfdp.hosts.ring`): part q begins with worker q's numbers,
# to which those of q + 1, q + 2 ... are added, one after the other. So every worker
# gets the bits that a ring gives, whichever way a sum takes.


# Up to here one call that is slow for each number beats a call for each row.
MOST_ACCUMULATED = 1 << 13


class SmallSum:
    """One sum of flat arrays, in the few rounds of `way`.

    Args:
      way: "gather" or "doubling".
      inputs: flat arrays of one dtype; not changed.
      rank, workers: this worker; how many there are.
    """

    def __init__(self, way: str, inputs: Sequence[np.ndarray], rank: int, workers: int):
        self._way = way
        self._rank = rank
        self._workers = workers
        self._flat = inputs[0] if len(inputs) == 1 else np.concatenate(inputs)
        if way == "gather":
            self._rows = np.empty((workers, self._flat.size), self._flat.dtype)
            self._rows[0] = self._flat
            #: What the first round sends; it can go before the others are known here.
            self.first = self._rows[:1]
        else:
            # Parts differ by one number; what fills up is 0 and is thrown away.
            longest = -(-self._flat.size // workers)
            self._rows = np.zeros((workers, longest), self._flat.dtype)
            for part, start, stop in self._parts():
                row = (part - rank) % workers  # for the worker so far after
                self._rows[row, : stop - start] = self._flat[start:stop]
            self.first = self._rows[leaving(workers, 1)]

    def _parts(self) -> Iterator[tuple[int, int, int]]:
        edges = part_edges(self._flat.size, self._workers)
        return zip(range(self._workers), edges[:-1], edges[1:], strict=True)

    def run(self, outputs: Sequence[np.ndarray], ends: Sequence[End]) -> None:
        """Writes the sums into `outputs`, once `first` has been sent.

        Args:
          outputs: flat, shaped as the inputs.
          ends: see `tfdp.hosts.recursive_doubling`.
        """
        # Loss scaling looks for infinities; a warning for each would bury others.
        with np.errstate(over="ignore", invalid="ignore"):
            total = self._gathered(ends) if self._way == "gather" else self._met(ends)
        start = 0
        for output in outputs:
            output[...] = total[start : start + output.size]
            start += output.size

    def _gathered(self, ends: Sequence[End]) -> np.ndarray:
        gather_rows(self._rows, ends, begun=True)
        order = order_of_adding(self._flat.size, self._rank, self._workers)
        return added(self._rows.reshape(-1)[order])

    def _met(self, ends: Sequence[End]) -> np.ndarray:
        came = swap_rows(self._rows, ends, begun=True)
        # Row d is of the worker d places before: the one after is the last row.
        rows = np.empty_like(came)
        rows[0] = added(np.concatenate([came[:1], came[:0:-1]]))
        gather_rows(rows, ends)
        sums = np.empty_like(self._flat)
        for part, start, stop in self._parts():
            row = (self._rank - part) % self._workers  # of the worker so far before
            sums[start:stop] = rows[row, : stop - start]
        return sums


def added(rows: np.ndarray) -> np.ndarray:
    """The sum of the rows, one after the other; NumPy's `sum` may add in pairs."""
    if rows.size <= MOST_ACCUMULATED:
        return np.add.accumulate(rows, axis=0, dtype=rows.dtype)[-1]
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total


@functools.lru_cache(maxsize=8)
def order_of_adding(size: int, rank: int, workers: int) -> np.ndarray:
    """Where the numbers stand that are added up, [workers, size], the first one first.

    Places in flat rows of `size` numbers by distance: those of this worker, of the
    worker before it, and so on.

    >>> order_of_adding(4, rank=1, workers=2)
    array([[4, 5, 2, 3],
           [0, 1, 6, 7]])
    """
    starts = part_edges(size, workers)[1:]
    parts = np.searchsorted(starts, np.arange(size), side="right")
    sources = parts + np.arange(workers)[:, np.newaxis]
    return (rank - sources) % workers * size + np.arange(size)
