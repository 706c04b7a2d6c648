"""Short texts over MPI, in buffers of one size: nothing that comes is unpickled.

mpi4py's own way for objects pickles them, and allocates what a message announces.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["LONGEST_TEXT_BYTES", "bytes_of_first", "text_of_first", "texts_at_first"]

# Names of machines and addresses: the longest that DNS has is 255.
LONGEST_TEXT_BYTES = 512


def texts_at_first(world: Any, text: str) -> list[str] | None:
    """Everybody's `text`, by rank, on worker 0; None elsewhere.

    Args:
      world: a communicator of mpi4py.
      text: cut to LONGEST_TEXT_BYTES.
    """
    rows = np.zeros((world.size, LONGEST_TEXT_BYTES), np.uint8)
    world.Gather(_buffer_of(text), rows if world.rank == 0 else None)
    return [_text_in(row) for row in rows] if world.rank == 0 else None


def text_of_first(world: Any, text: str) -> str:
    """Worker 0's `text`, on every worker; see `texts_at_first`."""
    buffer = _buffer_of(text)
    world.Bcast(buffer)
    return _text_in(buffer)


def bytes_of_first(world: Any, own: bytes) -> bytes:
    """Worker 0's bytes, on every worker, which all bring as many."""
    buffer = np.frombuffer(bytearray(own), np.uint8)
    world.Bcast(buffer)
    return buffer.tobytes()


def _buffer_of(text: str) -> np.ndarray:
    buffer = np.zeros(LONGEST_TEXT_BYTES, np.uint8)
    told = text.encode()[:LONGEST_TEXT_BYTES]
    buffer[: len(told)] = np.frombuffer(told, np.uint8)
    return buffer


def _text_in(buffer: np.ndarray) -> str:
    return buffer.tobytes().rstrip(b"\0").decode(errors="replace")
