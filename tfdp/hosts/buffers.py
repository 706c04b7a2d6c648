"""Memory for results that TensorFlow takes over without a copy."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import numpy as np

# TensorFlow uses a NumPy result where it lies only when it begins at such an address.
ALIGNMENT_BYTES = 64


class BufferPool:
    """Reuses memory once nobody holds an array in it any more.

    Fresh memory costs a page fault for every 4 KB, which is more than the addition
    itself; a buffer that is reused too early would change a tensor under its reader.
    Python's reference count of the buffer tells: every view of it counts.
    """

    def __init__(self) -> None:
        self._buffers: list[np.ndarray] = []
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> np.ndarray:
        """An array of at least `size_bytes` uint8, aligned, with undefined content."""
        with self._lock:
            free = []
            for buffer in self._buffers:
                # The pool's list, the loop's name and getrefcount's own argument.
                if sys.getrefcount(buffer) == 3:
                    if fits(buffer, size_bytes):
                        return aligned(buffer, size_bytes)
                    free.append(id(buffer))
            # Where sizes change, one that is a little larger than all before takes
            # their place: else a buffer of each size would stay.
            self._buffers = [
                buffer
                for buffer in self._buffers
                if id(buffer) not in free
                or not buffer.size < size_bytes <= 2 * buffer.size
            ]
            buffer = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
            self._buffers.append(buffer)
            return aligned(buffer, size_bytes)


def fits(buffer: np.ndarray, size_bytes: int) -> bool:
    """Whether `buffer` holds that many bytes and is not far too large for them."""
    capacity = buffer.size - ALIGNMENT_BYTES
    return size_bytes <= capacity <= 2 * size_bytes + (1 << 16)


def aligned(buffer: np.ndarray, size_bytes: int) -> np.ndarray:
    """The part of `buffer` that begins at an aligned address."""
    start = -buffer.ctypes.data % ALIGNMENT_BYTES
    return buffer[start : start + size_bytes]


def views_of(pool: BufferPool, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Arrays shaped and typed as `arrays`, side by side in one buffer, all aligned."""
    ends = []
    offset = 0
    for array in arrays:
        ends.append(offset)
        offset += -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    memory = pool.take(max(offset, 1))
    return [
        memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        for start, array in zip(ends, arrays, strict=True)
    ]


def wholes_of(
    pool: BufferPool,
    pieces: Sequence[np.ndarray],
    ranges: Sequence[Sequence[tuple[int, int]]],
) -> list[np.ndarray]:
    """Flat arrays of which each worker has a piece, with undefined content.

    Args:
      pool: where their memory is from.
      pieces: this worker's, flat.
      ranges: for each array, by worker, first element and end.
    """
    # An array of the whole shape that takes no memory: only its shape is read.
    likes = [
        np.broadcast_to(np.zeros((), piece.dtype), (of_array[-1][1],))
        for piece, of_array in zip(pieces, ranges, strict=True)
    ]
    return views_of(pool, likes)


def put_own(
    wholes: Sequence[np.ndarray],
    pieces: Sequence[np.ndarray],
    ranges: Sequence[Sequence[tuple[int, int]]],
    rank: int,
) -> None:
    """Writes this worker's pieces into `wholes`, which `wholes_of` has made."""
    for whole, piece, of_array in zip(wholes, pieces, ranges, strict=True):
        whole[slice(*of_array[rank])] = piece


def unaligned_copy(array: np.ndarray) -> np.ndarray:
    """`array` at an address that TensorFlow does not take over: it has to copy.

    For what becomes the memory of a variable, which TensorFlow may write into and hand
    on as its own.
    """
    memory = np.empty(array.nbytes + ALIGNMENT_BYTES + 8, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES + 8
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
