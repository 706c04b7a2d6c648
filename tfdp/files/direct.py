"""Large files past the page cache (O_DIRECT). Pure; no framework is imported.

The page cache would take as much memory as the file is long, and processor time to fill
it, from a machine that trains. Here one block of memory is reused and written to disk
directly. Where the file system refuses, the same calls use the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

# O_DIRECT requires file offsets, sizes and memory at multiples of 512 or 4096.
ALIGNED_BYTES = 4096
BLOCK_BYTES = 8 * 2**20
CHECK_BYTES = 2 * BLOCK_BYTES  # a reader consumes one block while the next one arrives
SMALL_BYTES = 2**20  # smaller reads are faster from the page cache, which reads ahead
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
Piece = TypeVar("Piece")


def page_buffer(size_bytes: int) -> np.ndarray:
    """Page-aligned memory, rounded up to a multiple of ALIGNED_BYTES."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, max(_round_up(size_bytes), ALIGNED_BYTES), flags=flags)
    # Some kernels have no huge pages.
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


class _DirectFile:
    """A file opened twice: with O_DIRECT, if supported, and without."""

    def __init__(self, path: str | os.PathLike[str], flags: int):
        flags |= os.O_CLOEXEC
        self._cached = os.open(path, flags, 0o666)
        self._direct: int | None = None
        try:
            self._direct = os.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno not in REFUSALS:
                self.close()
                raise

    def _call(self, call: Callable[..., int], *arguments: Any) -> int:
        """Calls `os.preadv` or `os.pwritev`; falls back to the page cache."""
        if self._direct is not None:
            try:
                return call(self._direct, *arguments)
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
            # A disk with larger blocks, say, which only a call reveals.
            os.close(self._direct)
            self._direct = None
        return call(self._cached, *arguments)

    def _call_cached(self, call: Callable[..., int], *arguments: Any) -> int:
        return call(self._cached, *arguments)

    def close(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
        os.close(self._cached)


class DirectWriter(_DirectFile):
    """A new or emptied file to write sequentially, on disk after its `with` block."""

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._block = page_buffer(BLOCK_BYTES)
        self._filled = self._written = 0

    def write(self, content: bytes | memoryview) -> None:
        # NumPy releases the GIL while it copies.
        left = np.frombuffer(content, np.uint8)
        while left.size:
            taken = left[: self._block.size - self._filled]
            end = self._filled + taken.size
            np.copyto(self._block[self._filled : end], taken)
            self._filled, left = end, left[taken.size :]
            if end == self._block.size:
                self._flush(end)

    def _flush(self, size_bytes: int) -> None:
        begin = 0
        while begin < size_bytes:
            rest = self._block[begin:size_bytes].data
            written = self._call(os.pwritev, [rest], self._written)
            # A short write may leave an unaligned rest; `_call` handles that.
            begin, self._written = begin + written, self._written + written
        self._filled = 0

    def __enter__(self) -> DirectWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                # Write whole aligned blocks, then truncate the file to its size.
                size_bytes = self._written + self._filled
                is_direct = self._direct is not None
                self._flush(_round_up(self._filled) if is_direct else self._filled)
                os.ftruncate(self._cached, size_bytes)
        finally:
            self.close()


class DirectReader(_DirectFile):
    """A file to read from, at any offset."""

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path, os.O_RDONLY)

    def blocks(self, begin: int, end: int, buffer: np.ndarray) -> Iterator[np.ndarray]:
        """The bytes from `begin` to `end` in blocks, reading one block ahead.

        `buffer` is of `page_buffer`. With at least `buffer_bytes` all bytes are in it
        at the end, from `offset` on. Otherwise it needs CHECK_BYTES, and later blocks
        overwrite earlier ones. A shorter file raises a ValueError.
        """
        first = begin - self.offset(begin)
        chunks = []
        for at in range(first, end if begin < end else first, BLOCK_BYTES):
            place = (at - first) % buffer.size
            size_bytes = min(BLOCK_BYTES, _round_up(end - at))
            chunks.append((at, buffer[place : place + size_bytes]))
        read = self._call if end - begin >= SMALL_BYTES else self._call_cached
        for at, room in _read_ahead(lambda chunk: _fill(read, *chunk, end), chunks):
            yield room[max(begin - at, 0) : end - at]

    @staticmethod
    def offset(begin: int) -> int:
        """The position of byte `begin` in its buffer."""
        return begin % ALIGNED_BYTES

    @staticmethod
    def buffer_bytes(begin: int, end: int) -> int:
        """The buffer size for these bytes."""
        return _round_up(end) - begin + begin % ALIGNED_BYTES


def _fill(read: Callable[..., int], at: int, room: np.ndarray, end: int) -> None:
    wanted, got = min(room.size, end - at), 0
    while got < wanted:
        count = read(os.preadv, [room[got:].data], at + got)
        # After a short read the rest may be unaligned: the disk may refuse it, and then
        # it comes from the page cache.
        if not count:
            raise ValueError(f"it ends before byte {end}")
        got += count


def _read_ahead(
    make: Callable[[Piece], object], chunks: list[Piece]
) -> Iterator[Piece]:
    """Yields each chunk after `make`, which runs for the next one in a thread."""
    if len(chunks) == 1:
        make(chunks[0])
        yield chunks[0]
        return
    with ThreadPoolExecutor(1, "tfdp-read") as ahead:
        pending = [ahead.submit(make, chunk) for chunk in chunks[:1]]
        for number, chunk in enumerate(chunks):
            pending.pop().result()
            pending = [ahead.submit(make, c) for c in chunks[number + 1 : number + 2]]
            yield chunk
