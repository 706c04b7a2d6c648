"""Large files past the page cache (O_DIRECT). Pure; no framework is imported.

A file that goes through the page cache takes as many new pages of memory as it is long,
of a machine that trains, and time of its processors to fill them. Here one block is
filled, again and again, which goes to the disk as it lies in memory. Where a file
system does not do that, the same calls go through the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

# Places, sizes and memory must be multiples of what the disk asks for: 512 or 4096.
ALIGNED_BYTES = 4096
BLOCK_BYTES = 8 * 2**20
# One block is used while the next one comes.
CHECK_BYTES = 2 * BLOCK_BYTES
# Less is read faster with what lies around it, which is asked for next.
SMALL_BYTES = 2**20
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
Piece = TypeVar("Piece")


def page_buffer(size_bytes: int) -> np.ndarray:
    """Bytes that begin with a page of memory, and are all of a multiple of a block's
    alignment."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, max(_upwards(size_bytes), ALIGNED_BYTES), flags=flags)
    # Some kernels know no huge pages.
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def _upwards(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


class _DirectFile:
    """A file opened twice: past the page cache, if the file system agrees, and not."""

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
        """`os.preadv` or `os.pwritev`, if need be once more through the page cache."""
        if self._direct is not None:
            try:
                return call(self._direct, *arguments)
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
            # A disk with larger blocks, say, of which only a call tells.
            os.close(self._direct)
            self._direct = None
        return call(self._cached, *arguments)

    def _call_cached(self, call: Callable[..., int], *arguments: Any) -> int:
        return call(self._cached, *arguments)

    def close(self) -> None:
        """Closes it as it is."""
        if self._direct is not None:
            os.close(self._direct)
        os.close(self._cached)


class DirectWriter(_DirectFile):
    """A new file to write to, from its beginning to its end.

    Args:
      path: made, or made empty.

    Its end is on the disk when a `with` block around it has ended without an error.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._block = page_buffer(BLOCK_BYTES)
        self._filled = self._written = 0

    def write(self, content: bytes | memoryview) -> None:
        """Adds bytes to it."""
        # NumPy releases the interpreter's lock while it copies.
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
            # As in `_fill`, what is left of a call that was cut short.
            begin, self._written = begin + written, self._written + written
        self._filled = 0

    def __enter__(self) -> DirectWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._write_end()
        finally:
            self.close()

    def _write_end(self) -> None:
        """A whole number of the disk's blocks, and then cuts off what is too much."""
        size_bytes = self._written + self._filled
        is_direct = self._direct is not None
        end = _upwards(self._filled) if is_direct else self._filled
        self._flush(end)
        os.ftruncate(self._cached, size_bytes)


class DirectReader(_DirectFile):
    """A file to read bytes of, from anywhere.

    Args:
      path: of a file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path, os.O_RDONLY)

    def blocks(self, begin: int, end: int, buffer: np.ndarray) -> Iterator[np.ndarray]:
        """The bytes from `begin` to `end` in blocks; the next is read meanwhile.

        Args:
          begin: from 0.
          end: not behind the end of the file.
          buffer: of `page_buffer`, where they are put. Where it has `buffer_bytes` for
            them all of them lie there at the end, from `offset` on. Else it must have
            CHECK_BYTES, and what came first is overwritten.

        Raises:
          ValueError: the file is shorter.
        """
        first = begin - self.offset(begin)
        pieces = []
        for at in range(first, end if begin < end else first, BLOCK_BYTES):
            place = (at - first) % buffer.size
            size_bytes = min(BLOCK_BYTES, _upwards(end - at))
            pieces.append((at, buffer[place : place + size_bytes]))
        read = self._call if end - begin >= SMALL_BYTES else self._call_cached
        for at, room in _read_ahead(lambda piece: _fill(read, *piece, end), pieces):
            yield room[max(begin - at, 0) : end - at]

    @staticmethod
    def offset(begin: int) -> int:
        """How far into its buffer the byte `begin` is put."""
        return begin % ALIGNED_BYTES

    @staticmethod
    def buffer_bytes(begin: int, end: int) -> int:
        """What a buffer for these bytes takes."""
        return _upwards(end) - begin + begin % ALIGNED_BYTES


def _fill(read: Callable[..., int], at: int, room: np.ndarray, end: int) -> None:
    """Reads until `room` is full, or has what lies before `end`."""
    wanted, got = min(room.size, end - at), 0
    while got < wanted:
        count = read(os.preadv, [room[got:].data], at + got)
        # What is left of a call that was cut short may begin anywhere: the disk may
        # refuse it, and then it comes from the page cache.
        if not count:
            raise ValueError(f"it ends before byte {end}")
        got += count


def _read_ahead(
    make: Callable[[Piece], object], pieces: list[Piece]
) -> Iterator[Piece]:
    """Each of the pieces, made, while the next is being made in another thread."""
    if len(pieces) == 1:
        make(pieces[0])
        yield pieces[0]
        return
    with ThreadPoolExecutor(1, "tfdp-read") as ahead:
        coming = [ahead.submit(make, piece) for piece in pieces[:1]]
        for number, piece in enumerate(pieces):
            coming.pop().result()
            coming = [ahead.submit(make, p) for p in pieces[number + 1 : number + 2]]
            yield piece
