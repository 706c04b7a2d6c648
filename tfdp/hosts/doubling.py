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
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from tfdp.errors import CollectiveError

__all__ = ["End", "gather_blobs", "gather_rows", "leaving", "swap_rows"]

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
