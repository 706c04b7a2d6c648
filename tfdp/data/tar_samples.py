"""Samples of a tar file in WebDataset's form: files of one name, with other endings.

    000017.jpg 000017.cls 000018.jpg 000018.cls ...

A sample's key is the path up to the first dot of the file's name, the rest is the name
of a feature. Members come one after the other; nothing is written to the disk.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from tfdp.data.places import Place, open_binary

__all__ = ["KEY", "TarFault", "checksum_of_sample", "tar_samples"]

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
            open_binary(path) as file,
            tarfile.open(fileobj=file, mode="r|*") as archive,
        ):
            for member in archive:
                place = PurePosixPath(member.name)
                # Folders, and what WebDataset keeps beside the samples.
                if not member.isfile() or place.name.startswith((".", "__")):
                    continue
                stem, _, feature = place.name.partition(".")
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
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise TarFault(number, str(error)) from error
    if sample:
        yield sample


def checksum_of_sample(sample: Mapping[str, bytes]) -> str:
    """8 hexadecimal digits for the key, the features' names and what they hold."""
    value = 0
    for name in sorted(sample):
        for part in (name.encode(), b"\0", sample[name], b"\0"):
            value = zlib.crc32(part, value)
    return f"{value:08x}"
