"""The index of a set of TFRecord or tar files: contents, counts and checksums.

`name.index.json` is stored next to its files and written last: a set without an index
was never finished. Needs TensorFlow only for URLs such as `gs://bucket/folder`.
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
_FORMATS = ("tfdp.tfrecords/1", _FORMAT, _TAR_FORMAT)  # format 1 had no checksums
COMPRESSIONS = ("", "GZIP", "ZLIB")
# The framing of a record, and the largest expansion factor of deflate.
_LEAST_RECORD_BYTES, _MOST_INFLATION = 16, 1040
_NO_INDEX = (
    "either the set was never finished (write it again) or another tool wrote it (run "
    "tfdp.data.index_tfrecords once)"
)


@dataclass(frozen=True)
class RecordFile:
    """One file of a set.

    Args:
      name: file name in the set's directory.
      examples: its number of examples.
      size_bytes: its size.
      records_digest: 32 hexadecimal digits over the framing of all records in order;
        "" if not computed.
      ends_digest: 16 over the first and last 4 KiB; "" if not computed.
      checksums: 8 digits per sample of a tar file, concatenated (tar has none of its
        own); "" for TFRecords.
    """

    name: str
    examples: int
    size_bytes: int
    records_digest: str = ""
    ends_digest: str = ""
    checksums: str = ""


@dataclass(frozen=True)
class RecordIndex:
    """The contents of a set of TFRecord or tar files.

    Args:
      directory: The folder of the files and `name.index.json`: a local path or a URL.
      name: The set's name, such as "train".
      features: Name to `FeatureSpec`, the same for every example.
      files: The files in order; example i is in file i modulo their number.
      compression: "", "GZIP" or "ZLIB", as TensorFlow names them.
      container: The kind of files: "tfrecord", or "tar" (WebDataset).
    """

    directory: Place
    name: str
    features: Mapping[str, FeatureSpec]
    files: tuple[RecordFile, ...]
    compression: str = ""
    container: str = "tfrecord"

    @property
    def examples(self) -> int:
        """The number of examples."""
        return sum(file.examples for file in self.files)

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def path(self) -> Place:
        """The path of the index."""
        return self.directory / f"{self.name}{SUFFIX}"

    def file_path(self, file: RecordFile) -> Place:
        """The path of one of the files."""
        return self.directory / file.name

    def save(self) -> Place:
        """Writes the index atomically and returns its path."""
        content = {
            "format": _TAR_FORMAT if self.container == "tar" else _FORMAT,
            "name": self.name,
            "examples": self.examples,
            "compression": self.compression,
            "features": {name: asdict(spec) for name, spec in self.features.items()},
            "files": [
                {key: v for key, v in asdict(file).items() if v or key != "checksums"}
                for file in self.files
            ],
        }
        temporary = self.directory / temporary_name(self.path.name)
        try:
            temporary.write_text(with_checksum(content))
            if isinstance(temporary, Path):
                sync_file(temporary)
            temporary.replace(self.path)  # type: ignore[arg-type]
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(self.directory)  # does nothing for a URL
        return self.path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RecordIndex:
        """Reads the index at `path`, a file `name.index.json`.

        Raises:
          DataError: It is missing, damaged, or names files outside its folder.
        """
        path = place_of(path)
        try:
            content = parse_json(path.read_text())
        except FileNotFoundError as error:
            raise DataError(f"no index {path}: {_NO_INDEX}") from error
        except (ValueError, OSError) as error:
            # A remote store's `DataError` is a ValueError, too.
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
            is_checked = found_format != _FORMATS[0]
            if is_checked and content["checksum"] != checksum_of(content):
                raise DataError(
                    f"{path} was changed after it was written: its checksum is "
                    "wrong. Restore it, or make it anew with tfdp.data.index_tfrecords"
                )
            features = content["features"].items()
            index = cls(
                directory=path.parent,
                name=content["name"],
                features={name: FeatureSpec(**spec) for name, spec in features},
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
        """The same index with only the files whose names match `pattern`."""
        chosen = (f for f in self.files if fnmatch.fnmatchcase(f.name, pattern))
        return replace(self, files=tuple(chosen))


def _check_values(index: RecordIndex) -> None:
    """Raises a `ValueError` for values that would open, delete or allocate too much."""
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
        # A batch is allocated by this shape before any record is read.
        if math.prod(length or 0 for length in spec.shape) > largest:
            raise ValueError(f"no record can hold {name!r} of shape {spec.shape}")


def find_index(source: str | os.PathLike[str] | RecordIndex) -> RecordIndex:
    """The index that `source` names, restricted to the files it matches.

    Args:
      source: An index; its path; a directory that holds one; a set's path without an
        ending (`out/train`); or a pattern of file names (`out/train-*.tfrecord`).
        Paths may be URLs that `tf.io.gfile` opens.

    Raises:
      DataError: There is no index, or a file that matches the pattern is in none.
      ConfigurationError: Several indexes fit, or TensorFlow opens no such URL.
    """
    if isinstance(source, RecordIndex):
        return source
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigurationError(
            "a set is named by one path or pattern, such as 'records/train', or by its "
            f"RecordIndex. Received: {str(source)[:300]}."
        )
    try:
        return _find(os.fspath(source), place_of(source))
    except OSError as error:
        raise DataError(f"nothing can be read there: {error}") from error


def _find(text: str, path: Place) -> RecordIndex:
    if text.endswith(SUFFIX):
        return RecordIndex.load(path)
    # Not `with_name`, which fails for the current folder and the root.
    of_set = path.parent / f"{path.name}{SUFFIX}"
    # Object stores may report the start of a file's name as a folder.
    if isinstance(path, RemotePath) and of_set.is_file():
        return RecordIndex.load(of_set)
    if path.is_dir():
        return _index_in(path)
    if of_set.is_file():
        return RecordIndex.load(of_set)
    return _index_of_pattern(path)


def _index_in(directory: Place) -> RecordIndex:
    found: list[Place] = sorted(directory.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        names = ", ".join(path.name.removesuffix(SUFFIX) for path in found)
        raise ConfigurationError(
            f"{directory} holds the sets {names}; name one, such as "
            f"{directory / found[0].name.removesuffix(SUFFIX)}"
        )
    if not found:
        raise DataError(f"no *{SUFFIX} in {directory}: {_NO_INDEX}")
    return RecordIndex.load(found[0])


def _index_of_pattern(pattern: Place) -> RecordIndex:
    # Skip indexes and a running writer's temporary files.
    matched = {
        path.name
        for path in pattern.parent.glob(pattern.name)
        if not path.name.endswith(SUFFIX) and PREFIX not in path.name
    }
    paths: list[Place] = sorted(pattern.parent.glob(f"*{SUFFIX}"))
    indexes = [RecordIndex.load(path) for path in paths]
    fitting = [index for index in indexes if index.select(pattern.name).files]
    if len(fitting) > 1:
        names = ", ".join(index.name for index in fitting)
        raise ConfigurationError(
            f"{pattern} matches files of the sets {names}; narrow it to one set"
        )
    if not fitting and not matched:
        names = ", ".join(index.name for index in indexes) or "none"
        there = f"the sets in {pattern.parent}: {names}"
        if not pattern.parent.is_dir():
            there = f"there is no directory {pattern.parent}"
        raise DataError(f"no file matches {pattern}; {there}")
    indexed = {file.name for index in fitting for file in index.files}
    strangers = sorted(matched - indexed)
    if strangers:
        raise DataError(
            f"{len(strangers)} of the files that match {pattern} are in no index, "
            f"the first is {strangers[0]}: {_NO_INDEX}"
        )
    return fitting[0].select(pattern.name)


def files_to_index(
    pattern: str | os.PathLike[str],
    name: str,
    is_member: Callable[[Place], bool],
    of_members: str = "",
) -> tuple[Place, list[RecordFile]]:
    """The directory and the files (names and sizes only) of a set without an index.

    `is_member` selects the set's files among the pattern's matches; `of_members` is
    appended to "no file" in the error.
    """
    if not is_plain_name(f"{name}{SUFFIX}"):
        raise ConfigurationError(
            f"name is {str(name)[:300]!r}; it starts a file name next to the files"
        )
    if not isinstance(pattern, (str, os.PathLike)):
        raise ConfigurationError(
            "files to index are named by one pattern, such as 'out/train-*.tar'. "
            f"Received: {str(pattern)[:300]!r}."
        )
    text = os.fspath(pattern)
    paths = list(filter(is_member, matching_files(pattern)))
    if not paths:
        raise DataError(
            f"no file{of_members} matches {text}; name existing files by one pattern, "
            "such as 'out/train-*'"
        )
    if len({path.parent for path in paths}) > 1:
        raise DataError(
            f"{text} matches files of several directories; a set lies in one, so "
            "index each by itself"
        )
    unread = [RecordFile(path.name, 0, path.stat().st_size) for path in paths]
    return paths[0].parent, unread


def require_container(index: RecordIndex, container: str) -> None:
    """Raises a `ConfigurationError` for an index of files of another kind."""
    readers = {"tfrecord": "read_tfrecords", "tar": "read_webdataset"}
    if index.container != container:
        raise ConfigurationError(
            f"{index.path} is an index of {index.container} files: read them with "
            f"tfdp.data.{readers[index.container]}."
        )
