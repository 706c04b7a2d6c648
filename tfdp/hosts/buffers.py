"""Memory for results that TensorFlow takes over without copying."""

from __future__ import annotations

import sys
import threading

import numpy as np

from tfdp.hosts.host_link import Arrays, Ranges

# TensorFlow takes over a NumPy result only if its address is a multiple of this.
ALIGNMENT_BYTES = 64


class BufferPool:
    """Reuses memory once no array refers to it.

    Fresh memory costs a page fault per 4 KB, more than the addition itself; reusing a
    buffer too early would change a tensor in use. The buffer's reference count shows
    when it is free: each view holds a reference.
    """

    def __init__(self) -> None:
        self._buffers: list[np.ndarray] = []
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> np.ndarray:
        """Returns at least `size_bytes` of aligned uint8 memory, not initialized."""
        with self._lock:
            free = []
            for buffer in self._buffers:
                # The pool's list, the loop's name and getrefcount's own argument.
                if sys.getrefcount(buffer) == 3:
                    if fits(buffer, size_bytes):
                        return aligned(buffer, size_bytes)
                    free.append(id(buffer))
            # A slightly larger request replaces smaller free buffers: otherwise growing
            # sizes would leave one buffer each.
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
    """Whether `buffer` is large enough, and not far too large."""
    capacity = buffer.size - ALIGNMENT_BYTES
    return size_bytes <= capacity <= 2 * size_bytes + (1 << 16)


def aligned(buffer: np.ndarray, size_bytes: int) -> np.ndarray:
    """The part of `buffer` that starts at an aligned address."""
    start = -buffer.ctypes.data % ALIGNMENT_BYTES
    return buffer[start : start + size_bytes]


def views_of(pool: BufferPool, arrays: Arrays) -> list[np.ndarray]:
    """Aligned arrays of the shapes and types of `arrays`, in one pool buffer."""
    starts, offset = [], 0
    for array in arrays:
        starts.append(offset)
        offset += -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    memory = pool.take(max(offset, 1))
    return [
        memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def wholes_of(pool: BufferPool, pieces: Arrays, ranges: Ranges) -> list[np.ndarray]:
    """Uninitialized flat arrays that hold every worker's range; see `Ranges`."""
    # Takes no memory: only its shape is read.
    likes = [
        np.broadcast_to(np.zeros((), piece.dtype), (of_array[-1][1],))
        for piece, of_array in zip(pieces, ranges, strict=True)
    ]
    return views_of(pool, likes)


def put_own(wholes: Arrays, pieces: Arrays, ranges: Ranges, rank: int) -> None:
    """Copies this worker's pieces into the results of `wholes_of`."""
    for whole, piece, of_array in zip(wholes, pieces, ranges, strict=True):
        whole[slice(*of_array[rank])] = piece


def unaligned_copy(array: np.ndarray) -> np.ndarray:
    """A copy that TensorFlow must copy again: it writes into memory of variables."""
    memory = np.empty(array.nbytes + ALIGNMENT_BYTES + 8, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES + 8
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
