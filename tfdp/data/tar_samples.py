"""Samples of a tar file in WebDataset's form: files of one name, with other endings.

    000017.jpg 000017.cls 000018.jpg 000018.cls ...

The path up to the first dot of the file's name is the key, the rest, in small letters,
names a feature. A compressed file may hold a thousand times its size, so every read is
bounded.
"""

from __future__ import annotations

import bz2
import contextlib
import dataclasses
import functools
import gzip
import lzma
import math
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from tfdp.data.places import Place

#: Of all files of a sample, as a training holds many samples in memory.
MOST_SAMPLE_BYTES = 1 << 30
BLOCK_BYTES = 1048576
MOST_HEADER_BYTES = 4 * BLOCK_BYTES  # tarfile keeps all of a member's headers in memory
# Of a sample of which only checksums are needed; later files are read and dropped.
MOST_KEPT_BYTES = 16 * BLOCK_BYTES

# By the first bytes of a compressed file.
UNPACKERS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}
LONGEST_MAGIC = max(UNPACKERS, key=len)
FAULTS = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)

KEY = "__key__"  # the feature that holds the key of a sample
# The rules of the package webdataset (1.0.2): the path up to the first dot of a file's
# name, then the rest, but of nothing that is, or is in, a `__name__` at the top. A
# hidden file belongs to `folder/`. Takes linear time, for names of some MiB.
_SAMPLE_FILE = re.compile(
    r"(?!__[^/]*__(?:$|/))(?P<key>(?:.*/)?(?:[^./]+|[^./]*/))\.(?P<feature>[^/]*)$",
    re.DOTALL,
)
_NO_FEATURE = re.compile("(__.*__)?")  # such as KEY


class TarFault(Exception):
    """Fault in the archive: `reason`, after `sample` whole samples."""

    def __init__(self, sample: int, reason: str):
        super().__init__(f"sample {sample} (counted from 0): {reason}")


@dataclasses.dataclass(frozen=True)
class Passed:
    """Checksum and size of content that was read but not kept."""

    crc32: int
    size_bytes: int


class _Metered:
    """A file that bounds how much tarfile reads for headers."""

    def __init__(self, file: Any):
        self._file = file
        self.allowed_bytes: float = MOST_HEADER_BYTES

    def read(self, count: int) -> bytes:
        data: bytes = self._file.read(count)
        self.allowed_bytes -= len(data)
        if self.allowed_bytes < 0:
            raise tarfile.ReadError(
                f"what comes before a file (its name, a sparse file's map) has more "
                f"than {MOST_HEADER_BYTES} bytes"
            )
        return data


def tar_samples(path: Place, *, keeps: bool = True) -> Iterator[dict[str, Any]]:
    """The samples of a tar file, compressed or not: feature name to content, and `KEY`.

    Unless `keeps`, some content of long samples is `Passed`. A damaged file, a feature
    given twice and more than `MOST_SAMPLE_BYTES` raise a `TarFault`.
    """
    number = sample_bytes = 0
    sample: dict[str, Any] = {}
    try:
        with (
            path.open("rb") as packed,
            _unpacked(packed) as unpacked,
            tarfile.open(
                fileobj=cast(Any, file := _Metered(unpacked)), mode="r|"
            ) as archive,
        ):
            for member, blocks in _members(archive, file):
                named = _key_and_feature(member, number)
                if named is None:
                    continue
                key, feature = named
                if sample and key != sample[KEY]:
                    yield sample
                    number, sample, sample_bytes = number + 1, {}, 0
                if feature in sample:
                    raise TarFault(
                        number,
                        f"it has {feature!r} twice (small and capital letters "
                        "are the same in an ending)",
                    )
                # Count headers as well, so that empty files are bounded, too.
                sample_bytes += tarfile.BLOCKSIZE + member.size
                if sample_bytes > MOST_SAMPLE_BYTES:
                    raise TarFault(
                        number,
                        f"with {member.name} its files have {sample_bytes} bytes; at "
                        f"most {MOST_SAMPLE_BYTES} are read. Cut it into several",
                    )
                sample.setdefault(KEY, key)
                kept = keeps or sample_bytes <= MOST_KEPT_BYTES
                content: bytes | Passed = b"".join(blocks) if kept else _passed(blocks)
                size = (
                    content.size_bytes if isinstance(content, Passed) else len(content)
                )
                if size < member.size:
                    raise TarFault(number, "the file ends within it")
                sample[feature] = content
            _check_end(archive, number + bool(sample))
    except FAULTS as error:
        raise TarFault(number, str(error)) from error
    if sample:
        yield sample


def _key_and_feature(member: tarfile.TarInfo, number: int) -> tuple[bytes, str] | None:
    """None for folders, WebDataset's metadata, and a LICENSE, say."""
    if member.islnk() or member.issym():
        raise TarFault(
            number,
            f"{member.name} is a link to {member.linkname}, without content; pack "
            "files (tar --dereference --hard-dereference)",
        )
    found = _SAMPLE_FILE.match(member.name)
    if not member.isfile() or not found:
        return None
    feature = found["feature"].lower()
    if not feature.isprintable() or _NO_FEATURE.fullmatch(feature):
        raise TarFault(
            number,
            f"{member.name!a} has an ending that cannot name a feature, {feature!a}; "
            "rename it, or pack the archive without it",
        )
    # A name that is no UTF-8 keeps its bytes.
    return found["key"].encode(errors="surrogateescape"), feature


def _passed(blocks: Iterator[bytes]) -> Passed:
    crc32 = size_bytes = 0
    for block in blocks:
        crc32, size_bytes = zlib.crc32(block, crc32), size_bytes + len(block)
    return Passed(crc32, size_bytes)


def _members(
    archive: tarfile.TarFile, file: _Metered
) -> Iterator[tuple[tarfile.TarInfo, Iterator[bytes]]]:
    """Each member with the blocks of its content; skips unread blocks."""
    while (member := archive.next()) is not None:
        # tarfile would keep every member.
        archive.members.clear()  # type: ignore[attr-defined]
        file.allowed_bytes = math.inf
        blocks: Iterator[bytes] = iter(())
        if member.isfile() and (content := archive.extractfile(member)) is not None:
            blocks = iter(functools.partial(content.read, BLOCK_BYTES), b"")
        yield member, blocks
        for _ in blocks:
            pass
        file.allowed_bytes = MOST_HEADER_BYTES
    file.allowed_bytes = math.inf


def _unpacked(file: Any) -> contextlib.AbstractContextManager[Any]:
    """The decompressed file; `tarfile` would stop after the first compressed part."""
    magic = file.read(len(LONGEST_MAGIC))
    file.seek(0)
    for beginning, unpack in UNPACKERS.items():
        if magic.startswith(beginning):
            return contextlib.closing(unpack(file))
    return contextlib.nullcontext(file)


def _check_end(archive: tarfile.TarFile, number: int) -> None:
    """Raises a `TarFault` unless only zeros follow the end of the archive."""
    while block := archive.fileobj.read(tarfile.RECORDSIZE):  # type: ignore[union-attr]
        if block.strip(b"\0"):
            raise TarFault(
                number,
                "more follows after the end of the archive: it is damaged, or files "
                "were joined by cat; pass them separately, or use tar --concatenate",
            )


def checksum_of_sample(sample: Mapping[str, bytes | Passed]) -> str:
    """8 hexadecimal digits over the key and the features' names and content."""
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


def joined_crc32(first: int, second: int, second_bytes: int) -> int:
    """`zlib.crc32` of two consecutive parts, given that of each and the second's size.

    A CRC is affine in its start value: swap in `first` on zeros of the same length.
    """
    zeros = bytes(BLOCK_BYTES)
    shifted, of_zeros = first, 0
    for left in range(second_bytes, 0, -BLOCK_BYTES):
        shifted = zlib.crc32(zeros[:left], shifted)
        of_zeros = zlib.crc32(zeros[:left], of_zeros)
    return shifted ^ of_zeros ^ second
