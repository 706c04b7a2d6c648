"""Exchanges in ceil(log2 p) rounds: in each one twice as many workers have met.

Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient Algorithms for All-to-All
Communications in Multiport Message-Passing Systems" (1997): in round k everybody sends
to the worker 2^k places after, and receives from the one 2^k places before. That needs
no power of two, and p workers of ceil(log2 p) connections each.

Pure arithmetic and order, no sockets; `ends` are, for each distance 1, 2, 4 ..., what
sends to the worker so far after and what receives from the one so far before.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tfdp.errors import CollectiveError

__all__ = ["End", "gather_blobs", "gather_rows", "leaving", "swap_rows"]

LENGTH_BYTES = 8


class End(Protocol):
    """The connections at one distance."""

    def send(self, data: np.ndarray | bytes) -> None:
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
    blob: bytes, rank: int, workers: int, most_bytes: int, ends: Sequence[End]
) -> list[bytes]:
    """The bytes of all workers, by rank; their lengths may differ.

    Args:
      blob: this worker's.
      rank, workers: of this worker; how many there are.
      most_bytes: what each may bring, as all have agreed.
      ends: see above.

    Raises:
      CollectiveError: when this worker brings more, or another one says that it does:
        before any memory is taken for it.
    """
    _check_size(len(blob), rank, most_bytes)
    held = [blob]  # by how many places before
    for end in ends:
        count = min(len(held), workers - len(held))
        lengths = struct.Struct(f"<{count}Q")
        sizes = map(len, held[:count])
        end.send(b"".join([lengths.pack(*sizes), *held[:count]]))
        coming = lengths.unpack(end.take(count * LENGTH_BYTES))
        first = len(held)
        for place, size in enumerate(coming, start=first):
            _check_size(size, (rank - place) % workers, most_bytes)
        came = memoryview(end.take(sum(coming)))
        for size in coming:
            held.append(bytes(came[:size]))
            came = came[size:]
    return [held[(rank - other) % workers] for other in range(workers)]


def _check_size(size: int, rank: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise CollectiveError(
            f"Worker {rank} brings {size} bytes to a gather to which each worker may "
            f"bring {most_bytes} at most. Gather less at a time; if it is not so much, "
            "see that all workers run the same program and the same tfdp."
        )
