"""Everybody's bytes round the ring: a length, checked, then that many bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable

from tfdp.errors import CollectiveError

__all__ = ["ring_gather"]

LENGTH = struct.Struct("<Q")


def ring_gather(
    blob: bytes,
    rank: int,
    workers: int,
    most_bytes: int,
    send: Callable[[bytes], None],
    take: Callable[[int], bytearray],
) -> list[bytes]:
    """The bytes of all workers, by rank.

    Args:
      blob: this worker's.
      rank: this worker.
      workers: how many there are.
      most_bytes: what each may bring, as all have agreed.
      send: passes bytes to the worker after.
      take: the next so many bytes of the worker before.

    Raises:
      CollectiveError: when this worker brings more, or another one says that it does.
    """
    _check_size(len(blob), rank, most_bytes)
    blobs = [b""] * workers
    blobs[rank] = blob
    for step in range(workers - 1):
        # In each turn the blob goes on that came in the turn before.
        mine = blobs[(rank - step) % workers]
        send(LENGTH.pack(len(mine)) + mine)
        source = (rank - step - 1) % workers
        (size,) = LENGTH.unpack(take(LENGTH.size))
        _check_size(size, source, most_bytes)
        blobs[source] = bytes(take(size))
    return blobs


def _check_size(size: int, rank: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise CollectiveError(
            f"Worker {rank} brings {size} bytes to a gather to which each worker may "
            f"bring {most_bytes} at most. Gather less at a time; if it is not so much, "
            "see that all workers run the same program and the same tfdp."
        )
