"""Sender and receiver whose blocks carry CRC32C checksums.

A block: its length, the CRC of its bytes, the CRC of these two, then the bytes. TCP's
own checksum has 16 bits and is computed by network cards, so data changed by a card,
switch or driver can arrive as valid. Here blocks are checked while in the cache.
"""

from __future__ import annotations

import functools
import socket
import struct
from collections.abc import Callable

import numpy as np

from tfdp.errors import MissingDependencyError
from tfdp.hosts.ring import BLOCK_BYTES
from tfdp.hosts.wire import LARGEST_DIRECT_BYTES, Receiver, Sender, as_bytes

SIZES = struct.Struct("<II")
CHECKSUM = struct.Struct("<I")
HEAD_BYTES = SIZES.size + CHECKSUM.size
# Largest message that goes to the kernel in one piece, without its head.
LARGEST_SHORT_BYTES = LARGEST_DIRECT_BYTES - HEAD_BYTES


@functools.cache
def crc32c() -> Callable[[np.ndarray], int]:
    """The CRC32C function for byte arrays; MissingDependencyError if it is slow."""
    hint = (
        "Communication(checksum=True) needs the package google-crc32c, a dependency of "
        "tfdp, with its compiled part. `pip install --force-reinstall google-crc32c` "
        "brings both; or leave checksum out."
    )
    try:
        import google_crc32c
    except ImportError as error:
        raise MissingDependencyError(f"{hint} Importing it failed: {error}") from error
    if google_crc32c.implementation != "c":
        raise MissingDependencyError(
            f"{hint} Here it computes in {google_crc32c.implementation}, which is a "
            "thousand times slower."
        )
    return google_crc32c.value  # type: ignore[no-any-return]


def checksum_of(data: bytes | bytearray | memoryview) -> int:
    """The CRC32C of `data`."""
    # The package takes no memoryview; it takes an array of the same memory.
    return crc32c()(np.frombuffer(data, np.uint8))


class DamagedBlockError(Exception):
    """A received block differs from the sent one; `receiver` is where it arrived."""

    def __init__(self, receiver: Receiver, reason: str):
        super().__init__(reason)
        self.receiver = receiver


class CheckedSender(Sender):
    """A `Sender` whose blocks carry checksums."""

    def __init__(self, connection: socket.socket, timeout_seconds: float):
        super().__init__(connection, timeout_seconds)
        self._heads = 0

    @property
    def sent_bytes(self) -> int:
        return self._taken_bytes - self._heads * HEAD_BYTES

    def _begin(self, view: memoryview) -> None:
        if view.nbytes > LARGEST_SHORT_BYTES:
            self._put(functools.partial(self._send_blocks, view))
        elif view.nbytes:
            self._heads += 1
            self._send_or_queue(memoryview(_head_of(view) + view))

    def _send_blocks(self, view: memoryview) -> None:
        for start in range(0, view.nbytes, BLOCK_BYTES):
            block = view[start : start + BLOCK_BYTES]
            head = _head_of(block)
            # One call: the head alone would become a packet of its own.
            sent = self._connection.sendmsg([head, block])
            if sent < len(head):
                self._connection.sendall(head[sent:])
            self._connection.sendall(block[max(sent - len(head), 0) :])
            self._heads += 1
            self._taken_bytes += len(head) + block.nbytes


class CheckedReceiver(Receiver):
    """Receives from a `CheckedSender`; never returns damaged data."""

    def __init__(self, connection: socket.socket, timeout_seconds: float):
        super().__init__(connection, timeout_seconds)
        # Checked rest of a block that is longer than the array that it filled.
        self._rest = memoryview(b"")

    def fill(self, array: np.ndarray) -> None:
        """Fills `array` like `Receiver.fill`; raises DamagedBlockError for damage."""
        view = as_bytes(array)
        with self._receiving:
            while view.nbytes:
                if not self._rest.nbytes:
                    view = view[self._receive_block(view) :]
                size = min(view.nbytes, self._rest.nbytes)
                view[:size] = self._rest[:size]
                view, self._rest = view[size:], self._rest[size:]

    def _receive_block(self, view: memoryview) -> int:
        """Receives a block; returns its bytes in `view`, 0 if `view` is too short."""
        head = bytearray(HEAD_BYTES)
        self._receive_whole(memoryview(head))
        size, checksum = SIZES.unpack_from(head)
        (of_head,) = CHECKSUM.unpack_from(head, SIZES.size)
        if checksum_of(head[: SIZES.size]) != of_head:
            raise DamagedBlockError(self, "the head of a block has another checksum")
        if not 0 < size <= max(BLOCK_BYTES, LARGEST_SHORT_BYTES):
            raise DamagedBlockError(self, f"a block of {size} bytes was announced")
        is_longer = size > view.nbytes
        block = memoryview(bytearray(size)) if is_longer else view[:size]
        self._receive_whole(block)
        if checksum_of(block) != checksum:
            reason = f"a block of {size} bytes has another checksum"
            raise DamagedBlockError(self, reason)
        if is_longer:
            self._rest = block
        return 0 if is_longer else size


def _head_of(block: memoryview) -> bytes:
    sizes = SIZES.pack(block.nbytes, checksum_of(block))
    return sizes + CHECKSUM.pack(checksum_of(sizes))
