"""Samples of a tar file in WebDataset's form: files of one name, with other endings.

    000017.jpg 000017.cls 000018.jpg 000018.cls ...

A sample's key is the path up to the first dot of the file's name, the rest is the name
of a feature. Members come one after the other; nothing is written to the disk.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from tfdp.data.places import Place, open_binary

__all__ = ["KEY", "TarFault", "checksum_of_sample", "tar_samples"]

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


def tar_samples(path: Place) -> Iterator[dict[str, bytes]]:
    """The samples of a tar file, packed or not, in its order.

    Args:
      path: of the file.

    Yields:
      Name of a feature to its bytes, with the key under `KEY`.

    Raises:
      TarFault: the file is cut short or damaged, or a sample has a feature twice.
      OSError: it cannot be read.
    """
    number = 0
    sample: dict[str, bytes] = {}
    try:
        with (
            open_binary(path) as packed,
            _unpacked(packed) as file,
            tarfile.open(fileobj=file, mode="r|") as archive,
        ):
            for member in archive:
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
                    number, sample = number + 1, {}
                if feature in sample:
                    raise TarFault(number, f"it has {feature!r} twice")
                content = archive.extractfile(member)
                data = b"" if content is None else content.read()
                if len(data) < member.size:
                    raise TarFault(number, "the file ends within it")
                sample = {KEY: key, **sample, feature: data}
            _refuse_more(archive, number + bool(sample))
    except FAULTS as error:
        raise TarFault(number, str(error)) from error
    if sample:
        yield sample


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


def checksum_of_sample(sample: Mapping[str, bytes]) -> str:
    """8 hexadecimal digits for the key, the features' names and what they hold."""
    value = 0
    for name in sorted(sample):
        for part in (name.encode(), b"\0", sample[name], b"\0"):
            value = zlib.crc32(part, value)
    return f"{value:08x}"
