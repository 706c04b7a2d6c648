"""The index of a set of TFRecord files: what is in them, and how much.

`name.index.json` lies beside its files and is written last: a set without an index
is a set that was never finished. Nothing here needs TensorFlow, unless they lie behind
a URL such as `gs://bucket/folder`.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tfdp.data.features import FeatureSpec
from tfdp.data.places import Place, RemotePath, place_of
from tfdp.errors import ConfigurationError, DataError

__all__ = ["COMPRESSIONS", "RecordFile", "RecordIndex", "find_index"]

SUFFIX = ".index.json"
_FORMAT = "tfdp.tfrecords/1"
COMPRESSIONS = ("", "GZIP", "ZLIB")


@dataclass(frozen=True)
class RecordFile:
    """One file of a set: its name, its number of examples, its size in bytes."""

    name: str
    examples: int
    size_bytes: int


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
    """

    directory: Place
    name: str
    features: Mapping[str, FeatureSpec]
    files: tuple[RecordFile, ...]
    compression: str = ""

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
            "format": _FORMAT,
            "name": self.name,
            "examples": self.examples,
            "compression": self.compression,
            "features": {name: asdict(spec) for name, spec in self.features.items()},
            "files": [asdict(file) for file in self.files],
        }
        temporary = self.directory / f".{self.path.name}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(content, indent=2) + "\n")
        temporary.replace(self.path)  # type: ignore[arg-type]
        return self.path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RecordIndex:
        """Reads an index.

        Args:
          path: A file `name.index.json`.

        Raises:
          DataError: There is none, or it is not one that `save` wrote.
        """
        path = place_of(path)
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise DataError(
                f"no index {path}: either the set was never finished (write it "
                "again) or another tool wrote it (run tfdp.data.index_tfrecords once)"
            ) from error
        except (ValueError, OSError) as error:
            raise DataError(
                f"{path} is no readable index ({error}); write the set again"
            ) from error
        return cls._from_json(path, content)

    @classmethod
    def _from_json(cls, path: Place, content: Any) -> RecordIndex:
        try:
            found_format = content["format"]
            if found_format != _FORMAT:
                raise DataError(
                    f"{path} has format {found_format!r}; this version of tfdp reads "
                    f"{_FORMAT!r}. Write the set again"
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
            )
            promised = content["examples"]
        except (KeyError, TypeError, AttributeError, ConfigurationError) as error:
            raise DataError(
                f"{path} lacks a field of an index or has a wrong one "
                f"({type(error).__name__}: {error}); write the set again"
            ) from error
        if promised != index.examples:
            raise DataError(
                f"{path} promises {promised} examples, its files' counts add up to "
                f"{index.examples}; write the set again"
            )
        return index

    def select(self, pattern: str) -> RecordIndex:
        """The same index with only the files whose names match a pattern."""
        chosen = (f for f in self.files if fnmatch.fnmatchcase(f.name, pattern))
        return replace(self, files=tuple(chosen))


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
    text = os.fspath(source)
    path = place_of(source)
    if text.endswith(SUFFIX):
        return RecordIndex.load(path)
    of_set = path.with_name(path.name + SUFFIX)
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
    matched = {name for name in matched if not name.endswith(SUFFIX)}
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


def _sets_beside(directory: Place, indexes: list[RecordIndex]) -> str:
    if not directory.is_dir():
        return f"there is no directory {directory}"
    names = ", ".join(index.name for index in indexes) or "none"
    return f"the sets in {directory}: {names}"
