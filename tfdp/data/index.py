"""The index of a set of TFRecord files: what is in them, and how much.

`name.index.json` lies beside its files and is written last: a set without an index
is a set that was never finished. It holds a checksum of each file's records and one of
itself. Nothing here needs TensorFlow, unless they lie behind a URL such as
`gs://bucket/folder`.
"""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tfdp.data.features import FeatureSpec
from tfdp.data.places import Place, RemotePath, matching_files, place_of
from tfdp.errors import ConfigurationError, DataError
from tfdp.files.atomic import PREFIX, sync_file, sync_folder, temporary_name
from tfdp.files.checked_json import (
    checksum_of,
    is_count,
    is_plain_name,
    parse_json,
    with_checksum,
)

SUFFIX = ".index.json"
_FORMAT, _TAR_FORMAT = "tfdp.tfrecords/2", "tfdp.webdataset/1"
# The first format had no checksums.
_FORMATS = ("tfdp.tfrecords/1", _FORMAT, _TAR_FORMAT)
COMPRESSIONS = ("", "GZIP", "ZLIB")
# What a record takes besides its content, and the most that deflate makes of a byte.
_LEAST_RECORD_BYTES, _MOST_INFLATION = 16, 1040


@dataclass(frozen=True)
class RecordFile:
    """One file of a set.

    Args:
      name: its name in the set's directory.
      examples: how many it holds.
      size_bytes: its size.
      records_digest: 32 hexadecimal digits for all records in their order (of their
        lengths and checksums); "" where nobody has taken them.
      ends_digest: 16 for its first and last 4 KiB; "" likewise.
      checksums: 8 for each sample of a tar file, one after the other: tar has none of
        its own. "" for TFRecords, which do.
    """

    name: str
    examples: int
    size_bytes: int
    records_digest: str = ""
    ends_digest: str = ""
    checksums: str = ""


@dataclass(frozen=True)
class RecordIndex:
    """What a set of TFRecord files holds.

    Args:
      directory: Where the files and `name.index.json` lie: a local path or a URL.
      name: The set's name, such as "train".
      features: Name to `FeatureSpec`, the same for every example.
      files: The files in order; example i was written to file i modulo their
        number.
      compression: "", "GZIP" or "ZLIB", as TensorFlow names them.
      container: What the files are: "tfrecord", or "tar" (WebDataset).
    """

    directory: Place
    name: str
    features: Mapping[str, FeatureSpec]
    files: tuple[RecordFile, ...]
    compression: str = ""
    container: str = "tfrecord"

    @property
    def examples(self) -> int:
        """The number of examples in all files."""
        return sum(file.examples for file in self.files)

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def path(self) -> Place:
        """Where the index itself lies."""
        return self.directory / f"{self.name}{SUFFIX}"

    def file_path(self, file: RecordFile) -> Place:
        """Where one of the files lies."""
        return self.directory / file.name

    def save(self) -> Place:
        """Writes the index beside its files in one step, and returns its path."""
        content = {
            "format": _TAR_FORMAT if self.container == "tar" else _FORMAT,
            "name": self.name,
            "examples": self.examples,
            "compression": self.compression,
            "features": {name: asdict(spec) for name, spec in self.features.items()},
            "files": [_plain(file) for file in self.files],
        }
        temporary = self.directory / temporary_name(self.path.name)
        try:
            temporary.write_text(with_checksum(content))
            if isinstance(temporary, Path):
                sync_file(temporary)
            temporary.replace(self.path)  # type: ignore[arg-type]
        finally:
            temporary.unlink(missing_ok=True)
        if isinstance(self.directory, Path):
            sync_folder(self.directory)
        return self.path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RecordIndex:
        """Reads an index.

        Args:
          path: A file `name.index.json`.

        Raises:
          DataError: There is none, it is not one that `save` wrote, or it was changed
            since, or names files that are not beside it.
        """
        path = place_of(path)
        try:
            content = parse_json(path.read_text())
        except FileNotFoundError as error:
            raise DataError(
                f"no index {path}: either the set was never finished (write it "
                "again) or another tool wrote it (run tfdp.data.index_tfrecords once)"
            ) from error
        except (ValueError, OSError) as error:
            # A `DataError` of the store is a ValueError, too, and says as much.
            raise DataError(
                f"{path} is no readable index ({error}); write the set again"
            ) from error
        return cls._from_json(path, content)

    @classmethod
    def _from_json(cls, path: Place, content: Any) -> RecordIndex:
        try:
            found_format = content["format"]
            if found_format not in _FORMATS:
                raise DataError(
                    f"{path} has format {str(found_format)[:100]!r}; this version of "
                    f"tfdp reads {' and '.join(_FORMATS)}. Write the set again"
                )
            if found_format != _FORMATS[0] and content["checksum"] != checksum_of(
                content
            ):
                raise DataError(
                    f"{path} was changed after it was written: its checksum is another "
                    "one. Restore it, or make it anew with tfdp.data.index_tfrecords"
                )
            index = cls(
                directory=path.parent,
                name=content["name"],
                features={
                    name: FeatureSpec(**spec)
                    for name, spec in content["features"].items()
                },
                files=tuple(RecordFile(**file) for file in content["files"]),
                compression=content["compression"],
                container="tar" if found_format == _TAR_FORMAT else "tfrecord",
            )
            _check_values(index)
            promised = content["examples"]
        except DataError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(
                f"{path} lacks a field of an index or has a wrong one "
                f"({type(error).__name__}: {str(error)[:300]}); write the set again"
            ) from error
        if promised != index.examples or not is_count(promised):
            raise DataError(
                f"{path} promises {str(promised)[:100]} examples, its files' counts "
                f"add up to {index.examples}; write the set again"
            )
        return index

    def select(self, pattern: str) -> RecordIndex:
        """The same index with only the files whose names match a pattern."""
        chosen = (f for f in self.files if fnmatch.fnmatchcase(f.name, pattern))
        return replace(self, files=tuple(chosen))


def _plain(file: RecordFile) -> dict[str, Any]:
    """What the index holds of a file."""
    return {name: v for name, v in asdict(file).items() if v or name != "checksums"}


def _check_values(index: RecordIndex) -> None:
    """Refuses what would open, delete or allocate something that no set is.

    Raises:
      ValueError: saying what.
    """
    if index.compression not in COMPRESSIONS:
        raise ValueError(f"compression is {index.compression!r}")
    names = [f"{index.name}{SUFFIX}", *(file.name for file in index.files)]
    strange = [name for name in names if not is_plain_name(name)]
    if strange or not isinstance(index.name, str) or len(set(names)) < len(names):
        raise ValueError(f"names are no plain names of files: {strange[:3]}")
    inflation = _MOST_INFLATION if index.compression else 1
    for file in index.files:
        digests = (file.records_digest, file.ends_digest)
        if not all(isinstance(d, str) for d in (*digests, file.checksums)):
            raise ValueError(f"the digests of {file.name} are no text")
        if not is_count(file.examples) or not is_count(file.size_bytes):
            raise ValueError(f"the sizes of {file.name} are no whole numbers")
        promised_digits = 8 * file.examples if index.container == "tar" else 0
        if len(file.checksums) != promised_digits:
            raise ValueError(f"{file.name} has other checksums than samples")
        if file.examples * _LEAST_RECORD_BYTES > file.size_bytes * inflation:
            raise ValueError(f"{file.name} cannot hold {file.examples} records")
    largest = max((file.size_bytes for file in index.files), default=0) * inflation
    for name, spec in index.features.items():
        # Memory for a batch is taken by the shape before a record is looked at.
        if math.prod(length or 0 for length in spec.shape) > largest:
            raise ValueError(f"no record can hold {name!r} of shape {spec.shape}")


def find_index(source: str | os.PathLike[str] | RecordIndex) -> RecordIndex:
    """The index that a source names, and of its files those that the source means.

    Args:
      source: An index; or the path of one; or a directory that holds one; or a
        set's path without an ending (`out/train`); or a pattern of file names
        (`out/train-*.tfrecord`). URLs that `tf.io.gfile` opens are paths, too.

    Raises:
      DataError: Nothing is there, no index is there, or a file that the pattern
        matches is in no index.
      ConfigurationError: Several indexes fit, or TensorFlow opens no such URL.
    """
    if isinstance(source, RecordIndex):
        return source
    try:
        return _find(os.fspath(source), place_of(source))
    except OSError as error:
        # Too long a name, no right to look.
        raise DataError(f"nothing can be read there: {error}") from error


def _find(text: str, path: Place) -> RecordIndex:
    if text.endswith(SUFFIX):
        return RecordIndex.load(path)
    # Not `with_name`, which the current folder and the root have none for.
    of_set = path.parent / f"{path.name}{SUFFIX}"
    # Behind a URL the start of a file's name may pass for a folder.
    if isinstance(path, RemotePath) and of_set.is_file():
        return RecordIndex.load(of_set)
    if path.is_dir():
        return RecordIndex.load(_single_index(path))
    if of_set.is_file():
        return RecordIndex.load(of_set)
    return _index_of_pattern(path)


def _single_index(directory: Place) -> Place:
    found: list[Place] = sorted(directory.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        names = ", ".join(path.name.removesuffix(SUFFIX) for path in found)
        raise ConfigurationError(
            f"{directory} holds the sets {names}; name one, such as "
            f"{directory / found[0].name.removesuffix(SUFFIX)}"
        )
    if not found:
        raise DataError(
            f"no *{SUFFIX} in {directory}: either the set was never finished (write "
            "it again) or another tool wrote it (run tfdp.data.index_tfrecords once)"
        )
    return found[0]


def _index_of_pattern(pattern: Place) -> RecordIndex:
    matched = {path.name for path in pattern.parent.glob(pattern.name)}
    # Nor what a writer has under its hands.
    matched = {
        name for name in matched if not name.endswith(SUFFIX) and PREFIX not in name
    }
    beside: list[Place] = sorted(pattern.parent.glob(f"*{SUFFIX}"))
    indexes = [RecordIndex.load(path) for path in beside]
    fitting = [index for index in indexes if index.select(pattern.name).files]
    if len(fitting) > 1:
        names = ", ".join(index.name for index in fitting)
        raise ConfigurationError(
            f"{pattern} matches files of the sets {names}; narrow it to one set"
        )
    if not fitting and not matched:
        raise DataError(
            f"no file matches {pattern}; {_sets_beside(pattern.parent, indexes)}"
        )
    known = {file.name for index in fitting for file in index.files}
    strangers = sorted(matched - known)
    if strangers:
        raise DataError(
            f"{len(strangers)} of the files that match {pattern} are in no index, "
            f"the first is {strangers[0]}: either the set was never finished (write "
            "it again) or another tool wrote it (run tfdp.data.index_tfrecords once)"
        )
    return fitting[0].select(pattern.name)


def files_to_index(
    pattern: str | os.PathLike[str],
    name: str,
    is_member: Callable[[Place], bool],
    of_members: str = "",
) -> tuple[Place, list[RecordFile]]:
    """The directory and the files of a set that has no index yet.

    Args:
      pattern: of file names in one directory.
      name: the set's, by which its index will be called.
      is_member: which of the files that match are the set's.
      of_members: what they have that others have not, in words.

    Returns:
      Of the files, names and sizes only.

    Raises:
      ConfigurationError: `name` is not allowed, or `pattern` is no text or path.
      DataError: no file matches, or files of several directories do.
    """
    if not is_plain_name(f"{name}{SUFFIX}"):
        raise ConfigurationError(
            f"name is {str(name)[:300]!r}; it begins a file name beside the files"
        )
    if not isinstance(pattern, (str, os.PathLike)):
        raise ConfigurationError(
            "files to index are named by one pattern, such as 'out/train-*.tar'. "
            f"Received: {str(pattern)[:300]!r}."
        )
    text = os.fspath(pattern)
    paths = list(filter(is_member, matching_files(pattern)))
    if not paths:
        raise DataError(f"no file{of_members} matches {text}")
    if len({path.parent for path in paths}) > 1:
        raise DataError(
            f"{text} matches files of several directories; a set lies in one, so "
            "index each by itself"
        )
    unread = [RecordFile(path.name, 0, path.stat().st_size) for path in paths]
    return paths[0].parent, unread


def require_container(index: RecordIndex, container: str) -> None:
    """Refuses an index of files of another kind.

    Raises:
      ConfigurationError: naming the reader that takes it.
    """
    readers = {"tfrecord": "read_tfrecords", "tar": "read_webdataset"}
    if index.container != container:
        raise ConfigurationError(
            f"{index.path} is an index of {index.container} files: read them with "
            f"tfdp.data.{readers[index.container]}."
        )


def _sets_beside(directory: Place, indexes: list[RecordIndex]) -> str:
    if not directory.is_dir():
        return f"there is no directory {directory}"
    names = ", ".join(index.name for index in indexes) or "none"
    return f"the sets in {directory}: {names}"
