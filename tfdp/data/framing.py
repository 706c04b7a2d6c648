"""Reads the framing of a TFRecord file without TensorFlow.

    8 bytes: length    4: its checksum    length bytes    4: their checksum

A digest of all lengths and checksums, in order, identifies the file in its index.
TensorFlow checks records against their checksums but never the checksums against the
index, and allocates memory for a length before checking that the file is that long.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import google_crc32c

from tfdp.data.places import Place

HEADER_BYTES, FOOTER_BYTES = 12, 4
BLOCK_BYTES = 2**20
END_BYTES = 4096
ANY_HEADER = 32 + zlib.MAX_WBITS  # zlib or gzip, detected from the first bytes


@dataclass(frozen=True)
class Framing:
    """The number of records in a file, and 32 hexadecimal digits over all of them."""

    records: int
    digest: str


class FramingFault(Exception):
    """A file stops being a sequence of records, after `record` whole ones.

    `is_claim`: a length with a sound checksum exceeds the file, as in a cut file.
    TensorFlow must not be given that.
    """

    def __init__(self, record: int, reason: str, is_claim: bool = False):
        super().__init__(record, reason)
        self.record, self.reason, self.is_claim = record, reason, is_claim


def scan_records(
    path: Place, compression: str = "", check_lengths: bool = False
) -> Framing:
    """Reads the framing of every record; raises a `FramingFault` if the file is cut.

    With `check_lengths` it also stops at the first length that does not match its
    checksum; without, that shows in the digest.

    Cost: reads the file once, in blocks of 1 MiB; some two microseconds a record.
    """
    digest = hashlib.blake2b(digest_size=16)
    records = position = 0
    with path.open("rb") as file:
        blocks: Iterable[bytes] = iter(functools.partial(file.read, BLOCK_BYTES), b"")
        stream = _Stream(_inflated(blocks) if compression else blocks)
        try:
            while header := stream.take(HEADER_BYTES):
                where = f"truncated record at byte {position}"
                if len(header) < HEADER_BYTES:
                    raise FramingFault(records, where)
                (length,) = struct.unpack_from("<Q", header)
                if check_lengths and not _length_checksum_fits(header):
                    raise FramingFault(records, f"corrupted record at byte {position}")
                if stream.skip(length) < length:
                    raise FramingFault(records, where, is_claim=True)
                footer = stream.take(FOOTER_BYTES)
                if len(footer) < FOOTER_BYTES:
                    raise FramingFault(records, where, is_claim=True)
                digest.update(header + footer)
                records += 1
                position += HEADER_BYTES + length + FOOTER_BYTES
        except zlib.error as error:
            raise FramingFault(records, f"cannot be decompressed ({error})") from error
    return Framing(records, digest.hexdigest())


def digest_of_ends(path: Place) -> str:
    """16 hexadecimal digits over the first and the last 4 KiB: two short reads."""
    size_bytes = path.stat().st_size
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        digest.update(file.read(END_BYTES))
        file.seek(max(0, size_bytes - END_BYTES))
        digest.update(file.read(END_BYTES))
    return digest.hexdigest()


class _Stream:
    """Re-chunks blocks of bytes; never holds more than one block."""

    def __init__(self, blocks: Iterable[bytes]):
        self._blocks, self._block, self._at = iter(blocks), b"", 0

    def take(self, count: int) -> bytes:
        taken = self._block[self._at : self._at + count]
        self._at += len(taken)
        while len(taken) < count and self._next():
            self._at = min(count - len(taken), len(self._block))
            taken += self._block[: self._at]
        return taken

    def skip(self, count: int) -> int:
        left = count
        while True:
            step = min(left, len(self._block) - self._at)
            self._at += step
            left -= step
            if not left or not self._next():
                return count - left

    def _next(self) -> bool:
        self._block, self._at = next(self._blocks, b""), 0
        return bool(self._block)


def _inflated(blocks: Iterable[bytes]) -> Iterator[bytes]:
    inflate = zlib.decompressobj(ANY_HEADER)
    is_begun = False
    for block in blocks:
        while block:
            is_begun = True
            # At most one block at a time: a small file may inflate to a huge one.
            if piece := inflate.decompress(block, BLOCK_BYTES):
                yield piece
            if not inflate.eof:
                block = inflate.unconsumed_tail
                continue
            block = inflate.unused_data  # compressed files may be concatenated
            inflate, is_begun = zlib.decompressobj(ANY_HEADER), False
    if is_begun:
        if piece := inflate.flush():
            yield piece
        if not inflate.eof:
            raise zlib.error("it ends too early")


@functools.lru_cache(maxsize=4096)  # lengths repeat
def _length_checksum_fits(header: bytes) -> bool:
    length, checksum = header[:8], struct.unpack_from("<I", header, 8)[0]
    value = google_crc32c.value(length)
    # TFRecord masks checksums: a checksum of data that holds checksums is weak.
    masked = ((value >> 15) | (value << 17 & 0xFFFFFFFF)) + 0xA282EAD8
    return (masked & 0xFFFFFFFF) == checksum
