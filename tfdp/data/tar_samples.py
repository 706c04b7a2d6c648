"""Samples of a tar file in WebDataset's form: files of one name, with other endings.

    000017.jpg 000017.cls 000018.jpg 000018.cls ...

A sample's key is the path up to the first dot of the file's name, the rest is the name
of a feature. Members come one after the other; nothing is written to the disk. Packed
files may hold a thousand times their size, so nothing in them is read without a limit.
"""

from __future__ import annotations

import bz2
import contextlib
import dataclasses
import functools
import gzip
import lzma
import math
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import IO, Any, cast

from tfdp.data.places import Place, open_binary

#: Of all files of a sample: a training has many samples in memory at once.
MOST_SAMPLE_BYTES = 1 << 30
BLOCK_BYTES = 1048576
# Of what tarfile reads before a file's content, where it keeps all that comes.
MOST_HEADER_BYTES = 4 * BLOCK_BYTES
# Of a sample that need not be kept; beyond it the files are passed.
MOST_KEPT_BYTES = 16 * BLOCK_BYTES

# By how a packed file begins.
UNPACKERS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}
LONGEST_MAGIC = max(UNPACKERS, key=len)
FAULTS = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)

#: The feature that holds the key of a sample.
KEY = "__key__"


class TarFault(Exception):
    """Where a file stops being a row of samples.

    Args:
      sample: how many whole samples come before.
      reason: what is wrong there.
    """

    def __init__(self, sample: int, reason: str):
        super().__init__(sample, reason)
        self.sample, self.reason = sample, reason


@dataclasses.dataclass(frozen=True)
class Passed:
    """Bytes that were read and not kept.

    Args:
      crc32: of them.
      size_bytes: how many there were.
    """

    crc32: int
    size_bytes: int

    @classmethod
    def through(cls, blocks: Iterable[bytes]) -> Passed:
        """What is known of the blocks together."""
        crc32 = size_bytes = 0
        for block in blocks:
            crc32, size_bytes = zlib.crc32(block, crc32), size_bytes + len(block)
        return cls(crc32, size_bytes)

    def __len__(self) -> int:
        return self.size_bytes


class _Metered:
    """A file of which tarfile reads no more than it may.

    Args:
      file: to read from.
    """

    def __init__(self, file: Any):
        self._file = file
        self.allowed_bytes: float = MOST_HEADER_BYTES

    def read(self, count: int) -> bytes:
        """The next bytes."""
        data: bytes = self._file.read(count)
        self.allowed_bytes -= len(data)
        if self.allowed_bytes < 0:
            raise tarfile.ReadError(
                f"what comes before a file (its name, a sparse file's map) has more "
                f"than {MOST_HEADER_BYTES} bytes"
            )
        return data


def tar_samples(path: Place, *, keeps: bool = True) -> Iterator[dict[str, Any]]:
    """The samples of a tar file, packed or not, in its order.

    Args:
      path: of the file.
      keeps: all bytes of long samples; else a `Passed` comes in the place of some.

    Yields:
      Name of a feature to its bytes, with the key under `KEY`.

    Raises:
      TarFault: the file is cut short or damaged, or a sample has a feature twice, or
        more than `MOST_SAMPLE_BYTES`.
      OSError: it cannot be read.
    """
    number = sample_bytes = 0
    sample: dict[str, Any] = {}
    try:
        with (
            open_binary(path) as packed,
            _unpacked(packed) as unpacked,
            tarfile.open(
                fileobj=cast(Any, file := _Metered(unpacked)), mode="r|"
            ) as archive,
        ):
            for member, blocks in _members(archive, file):
                place = PurePosixPath(member.name)
                if member.islnk() or member.issym():
                    raise TarFault(
                        number,
                        f"{member.name} is a link to {member.linkname}, which has no "
                        "content of its own here; pack the file (tar --dereference "
                        "--hard-dereference)",
                    )
                # Folders, and what WebDataset keeps beside the samples.
                if not member.isfile() or place.name.startswith((".", "__")):
                    continue
                stem, _, feature = place.name.partition(".")
                if not feature:
                    continue  # a LICENSE beside the samples, say
                key = str(place.with_name(stem)).encode()
                if sample and key != sample[KEY]:
                    yield sample
                    number, sample, sample_bytes = number + 1, {}, 0
                if feature in sample:
                    raise TarFault(number, f"it has {feature!r} twice")
                # With the header, so that many empty files are not free either.
                sample_bytes += tarfile.BLOCKSIZE + member.size
                if sample_bytes > MOST_SAMPLE_BYTES:
                    raise TarFault(
                        number,
                        f"with {member.name} its files have {sample_bytes} bytes; at "
                        f"most {MOST_SAMPLE_BYTES} are read into memory at once. Cut "
                        "it into several samples",
                    )
                sample.setdefault(KEY, key)
                is_kept = keeps or sample_bytes <= MOST_KEPT_BYTES
                content = b"".join(blocks) if is_kept else Passed.through(blocks)
                if len(content) < member.size:
                    raise TarFault(number, "the file ends within it")
                sample[feature] = content
            _refuse_more(archive, number + bool(sample))
    except FAULTS as error:
        raise TarFault(number, str(error)) from error
    if sample:
        yield sample


def _members(
    archive: tarfile.TarFile, file: _Metered
) -> Iterator[tuple[tarfile.TarInfo, Iterator[bytes]]]:
    """Each with the blocks of its content; what nobody reads of them is passed over."""
    while (member := archive.next()) is not None:
        # tarfile keeps all that came.
        archive.members.clear()  # type: ignore[attr-defined]
        file.allowed_bytes = math.inf
        blocks = _blocks(archive.extractfile(member) if member.isfile() else None)
        yield member, blocks
        for _ in blocks:
            pass
        file.allowed_bytes = MOST_HEADER_BYTES
    file.allowed_bytes = math.inf


def _blocks(content: IO[bytes] | None) -> Iterator[bytes]:
    while content is not None and (block := content.read(BLOCK_BYTES)):
        yield block


def _unpacked(file: Any) -> contextlib.AbstractContextManager[Any]:
    """What a packed file holds, or the file itself.

    Not by `tarfile`, which takes no more than the first of several packed parts.
    """
    magic = file.read(len(LONGEST_MAGIC))
    file.seek(0)
    for beginning, unpack in UNPACKERS.items():
        if magic.startswith(beginning):
            return contextlib.closing(unpack(file))
    return contextlib.nullcontext(file)


def _refuse_more(archive: tarfile.TarFile, number: int) -> None:
    """What follows the end of an archive is zeros, or nobody would read it."""
    while block := archive.fileobj.read(tarfile.RECORDSIZE):  # type: ignore[union-attr]
        if block.strip(b"\0"):
            raise TarFault(
                number,
                "more follows behind the end of the archive: it is damaged, or files "
                "were put together with cat; keep them apart, or use tar --concatenate",
            )


def checksum_of_sample(sample: Mapping[str, bytes | Passed]) -> str:
    """8 hexadecimal digits for the key, the features' names and what they hold."""
    value = 0
    for name in sorted(sample):
        value = zlib.crc32(name.encode() + b"\0", value)
        content = sample[name]
        if isinstance(content, Passed):
            value = joined_crc32(value, content.crc32, content.size_bytes)
        else:
            value = zlib.crc32(content, value)
        value = zlib.crc32(b"\0", value)
    return f"{value:08x}"


# The CRC-32 of bytes in a row, by the CRC-32 of each part: without the bytes.


# Of polynomials over two elements, the highest bit the lowest power: x^0, and the one
# by which CRC-32 divides, without its x^32.
ONE, DIVISOR = 1 << 31, 0xEDB88320


def joined_crc32(first: int, second: int, second_bytes: int) -> int:
    """As `zlib.crc32` of both parts, one behind the other.

        crc(A B) = crc(A) x^(8 |B|) + crc(B)

    Args:
      first: `zlib.crc32` of the first part.
      second: that of the second.
      second_bytes: length of the second, at least 0.

    Source: Mark Adler, `crc32_combine` of zlib 1.2.12.

    >>> import zlib
    >>> joined_crc32(zlib.crc32(b"12"), zlib.crc32(b"345"), 3) == zlib.crc32(b"12345")
    True
    """
    shift, bit = ONE, 3  # a byte is 2^3 bits
    while second_bytes:
        if second_bytes & 1:
            shift = _product(_power(bit), shift)
        second_bytes >>= 1
        bit += 1
    return _product(shift, first) ^ second


@functools.cache
def _power(bit: int) -> int:
    """x^(2^bit)."""
    if not bit:
        return ONE >> 1
    half = _power(bit - 1)
    return _product(half, half)


def _product(one: int, other: int) -> int:
    product = 0
    while one:
        if one & ONE:
            product ^= other
        one = one << 1 & 0xFFFFFFFF
        other = other >> 1 ^ (DIVISOR if other & 1 else 0)
    return product
