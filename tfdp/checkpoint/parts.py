"""`save_parts`: every host writes what it holds, none gathers the whole.

A part is a `.keras` file in which each sharded variable is this host's range of it,
flat. Which of the numbers in the file these are, and how they fit together, stands in
an index that the first host writes last: without it, or with a part missing, there is
no checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import secrets
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp.errors import CheckpointWarning, ConfigurationError, DataError, TfdpError
from tfdp.files.atomic import replaced, temporary
from tfdp.files.checked_json import checksum_of, is_count, parse_json, with_checksum
from tfdp.plan.shards import ShardLayout
from tfdp.sharding.variables import read_instead

# Nobody's weights: two whole numbers that say "variable k stands here".
MARK = 0x7F4A7C15F39CC060


def save_parts(model: keras.Model, directory: str | os.PathLike[str]) -> Path:
    """Writes a model, optimizer state included, one file for each host.

    Call it on every host. `tfdp merge DIRECTORY model.keras` (or `merge_parts`) makes
    one ordinary file of the parts, which any number of replicas, and plain Keras, can
    load. What an earlier call has written to the directory stays valid until all parts
    are there, and on the disk; then the parts of all earlier calls are deleted.

    Args:
      model: a built model, made in the scope of a strategy of tfdp.
      directory: made when it is not there; one that all hosts see, or whose files
        are brought together before they are merged.

    Returns:
      The directory.

    Raises:
      ConfigurationError: when the model was not made in such a scope, or the directory
        cannot be made.
      DataError: on several hosts, when one of them could not write; the same error on
        all. The parts of earlier calls are as they were.

    Warns:
      CheckpointWarning: all is written, and a part of an earlier call is left.

    Cost: each host writes n / H bytes of the n bytes in shards over H hosts, and what
    is not sharded, and reads them once for their checksum. No host holds more than it
    does in training. With `shard_group="host"` the first host has everything and writes
    alone.

    ```python
    import pathlib
    import tempfile

    import keras
    import tfdp

    strategy = tfdp.DataParallelStrategy(shard="parameters", shard_min_bytes=0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    folder = pathlib.Path(tempfile.mkdtemp())
    tfdp.checkpoint.save_parts(model, folder / "parts")
    tfdp.checkpoint.merge_parts(folder / "parts", folder / "model.keras")
    model = keras.models.load_model(folder / "model.keras")
    ```
    """
    strategy = _strategy_of(model)
    shards = strategy.extended.shards
    local = len(strategy.extended.worker_devices)
    parts, mine = 1, 0
    if shards is not None:
        parts = shards.reducer.shard_parts // local
        mine = shards.part_of(0) // local
    # An identity for each call: parts of two calls cannot be taken for one.
    key = int(strategy.from_chief(np.array(secrets.randbits(60)), "name of the parts"))
    write = f"{key:015x}"
    index = PartsIndex(write, {}, parts)
    folder = Path(directory)
    try:
        with _on_all_hosts(strategy, folder, "all parts of the checkpoint"):
            _make(folder)
            # Noted before anybody can have begun the next call.
            before = other_parts(folder, write)
            if strategy.is_chief or parts > 1:
                with read_instead(lambda variable: shards.own_range(variable)):
                    with replaced(folder / index.names[mine]) as half_written:
                        model.save(half_written)
                        note_identity(half_written, write, mine + 1, parts)
        with _on_all_hosts(strategy, folder, "the index of the checkpoint"):
            if strategy.is_chief:
                index = PartsIndex(write, _places(model, folder, local, parts), parts)
                with replaced(folder / INDEX_NAME) as half_written:
                    half_written.write_text(index.text())
    except (DataError, OSError):
        with contextlib.suppress(OSError):
            (folder / index.names[mine]).unlink(missing_ok=True)
        raise
    for path in before:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            warnings.warn(
                f"The parts in {folder} are whole, and {path.name} of an earlier call "
                f"could not be deleted ({type(error).__name__}: {error}).",
                CheckpointWarning,
                stacklevel=2,
            )
    return folder


@contextlib.contextmanager
def _on_all_hosts(strategy: Any, folder: Path, label: str) -> Iterator[None]:
    """Waits for all hosts at its end, and fails on all of them if it does on one.

    Raises:
      DataError: the same on all hosts; a host that is alone raises its own error.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    words = "" if own is None else f"{type(own).__name__}: {str(own)[:300]}"
    heard = strategy.gather_bytes(words.encode(), label)
    if own is not None and len(heard) == 1:
        raise own
    failed = [f"worker {r} ({why.decode()})" for r, why in enumerate(heard) if why]
    if failed:
        raise DataError(
            f"The parts of the model were not written to {folder}, because of "
            f"{'; '.join(failed)}. The parts of earlier calls are as they were."
        ) from own


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"The directory for the parts cannot be made: {error}. Received: "
            f"{str(folder)[:300]!r}."
        ) from error


def _strategy_of(model: keras.Model) -> Any:
    first = next(iter(model.variables), None)
    value = None if first is None else first.value
    strategy = getattr(value, "distribute_strategy", None)
    if not hasattr(strategy, "from_chief"):
        raise ConfigurationError(
            "save_parts needs a built model that was made in the scope of "
            "DataParallelStrategy or MultiHostDataParallelStrategy. Use model.save for "
            f"others. Received: {model!r}."
        )
    return strategy


def _places(model: keras.Model, folder: Path, local: int, parts: int) -> dict[str, Any]:
    """By place in the file: the whole's shape, and the elements of each part.

    Keras alone knows where it puts a variable: so the model is saved once more with a
    mark in the place of each.
    """
    import h5py

    layouts: list[ShardLayout] = []

    def mark(variable: Any) -> tf.Tensor:
        layouts.append(variable.layout)
        return tf.constant([MARK, len(layouts) - 1], tf.int64)

    places: dict[str, Any] = {}

    def note(path: str, item: Any) -> None:
        if not isinstance(item, h5py.Dataset) or item.dtype != np.int64:
            return
        if item.shape == (2,) and item[0] == MARK:
            layout = layouts[int(item[1])]
            edges = [layout.bounds(part * local)[0] for part in range(parts)]
            lengths = np.diff([*edges, layout.elements]).tolist()
            places[path] = {"shape": list(layout.shape), "lengths": lengths}

    with temporary(folder / "marked.keras") as marked:
        with read_instead(mark):
            model.save(marked)
        with zipfile.ZipFile(marked) as archive, archive.open(WEIGHTS_NAME) as file:
            with h5py.File(file, "r") as weights:
                weights.visititems(note)
    return places


# What a checkpoint in parts consists of, and what tells that it is whole and one.
#
#     parts.json                       the index: names, and what the parts hold
#     part-1-of-2-<write>.keras        a Keras file and, in it, `tfdp.json`
#
# `<write>` is drawn for each call of `save_parts`, one for all hosts. It stands in the
# index and in each part's `tfdp.json`, with the part's number and a checksum of all
# else in the part: a file of another call, another part, or a changed byte is refused,
# whatever the file is called.


INDEX_NAME = "parts.json"
# Keras' name for the numbers within a .keras file.
WEIGHTS_NAME = "model.weights.h5"
IDENTITY_NAME = "tfdp.json"
INDEX_FORMAT, PART_FORMAT = "tfdp.parts/2", "tfdp.part/1"
PART_NAME = re.compile(r"part-\d{1,9}-of-\d{1,9}-(?P<write>[0-9a-f]{15})\.keras")
MOST_PARTS = 100_000
BLOCK_BYTES = 2**20
REMEDY = "Bring it from its host again, or save the model again"


@dataclass(frozen=True)
class PartsIndex:
    """What the index of a checkpoint says.

    Args:
      write: the identity of the call that wrote it, 15 hexadecimal digits.
      sharded: by place in the file of weights, the whole's `shape` and the `lengths` of
        the parts' pieces.
      parts: how many there are.
    """

    write: str
    sharded: Mapping[str, Mapping[str, Any]]
    parts: int

    @property
    def names(self) -> list[str]:
        """The parts' files."""
        return part_names(self.write, self.parts)

    def text(self) -> str:
        """What the index's file holds."""
        return with_checksum(
            {
                "format": INDEX_FORMAT,
                "write": self.write,
                "parts": self.names,
                "sharded": self.sharded,
            }
        )


def part_names(write: str, parts: int) -> list[str]:
    """The names of a checkpoint's parts."""
    return [f"part-{i + 1}-of-{parts}-{write}.keras" for i in range(parts)]


def other_parts(folder: Path, write: str) -> list[Path]:
    """The parts of all other calls that lie in a folder."""
    return [
        path
        for path in folder.glob("part-*.keras")
        if (match := PART_NAME.fullmatch(path.name)) and match["write"] != write
    ]


def read_index(folder: Path) -> PartsIndex:
    """The index of a folder.

    Raises:
      DataError: there is none, it is damaged, or a part is missing.
    """
    path = folder / INDEX_NAME
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError as error:
        if not folder.is_dir():
            raise DataError(f"There is no folder {folder}.") from error
        if not any(folder.iterdir()):
            raise DataError(
                f"The folder {folder} is empty. Give the one that "
                "tfdp.checkpoint.save_parts, or tfdp.callbacks.Checkpoint, has written "
                "to."
            ) from error
        raise DataError(
            f"{folder} has no {INDEX_NAME}: tfdp.checkpoint.save_parts, which writes "
            "it last, has not ended there on the first host."
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}). {REMEDY}.") from error
    index = _index_of(path, content)
    missing = [name for name in index.names if not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"{folder} lacks {', '.join(missing[:10])} of {index.parts} parts. "
            "Bring the files of all hosts into one directory."
        )
    return index


def _index_of(path: Path, content: Any) -> PartsIndex:
    if isinstance(content, dict) and "format" not in content and "parts" in content:
        raise DataError(
            f"{path} was written by a version of tfdp whose parts hold no checksums, "
            "so that nothing tells whether they belong together. Merge it with that "
            "version, or save the model again."
        )
    try:
        if content["format"] != INDEX_FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        if content["checksum"] != checksum_of(content):
            raise ValueError(
                "it was changed after it was written: its checksum differs"
            )
        write, names, sharded = content["write"], content["parts"], content["sharded"]
        if not isinstance(names, list) or not 1 <= len(names) <= MOST_PARTS:
            raise ValueError("its parts are no list of names")
        if not isinstance(write, str) or names != part_names(write, len(names)):
            raise ValueError("its parts have names that save_parts does not give")
        if not all(map(PART_NAME.fullmatch, names)):
            raise ValueError("its parts have names that save_parts does not give")
        for place, entry in sharded.items():
            _check_entry(place, entry, len(names))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(
            f"{path} is not what save_parts writes ({type(error).__name__}: "
            f"{str(error)[:300]}). {REMEDY}."
        ) from error
    return PartsIndex(write, sharded, len(names))


def _check_entry(place: str, entry: Mapping[str, Any], parts: int) -> None:
    shape, lengths = entry["shape"], entry["lengths"]
    if not all(is_count(number) for number in (*shape, *lengths)):
        raise ValueError(f"sizes at {place!r} are no whole numbers")
    if len(lengths) != parts or sum(lengths) != math.prod(shape):
        raise ValueError(f"the pieces at {place!r} do not make up the whole")


def note_identity(path: Path, write: str, number: int, parts: int) -> None:
    """Puts into a part which one it is, and the checksum of all else in it.

    Cost: reads the part once.
    """
    with zipfile.ZipFile(path, "a") as archive:
        entries = {
            entry.filename: _digest(archive, entry) for entry in archive.infolist()
        }
        identity = {
            "format": PART_FORMAT,
            "write": write,
            "part": number,
            "parts": parts,
            "entries": entries,
        }
        archive.writestr(IDENTITY_NAME, with_checksum(identity))


@contextlib.contextmanager
def checked_part(path: Path, write: str, number: int, parts: int) -> Iterator[Any]:
    """The archive of a part, when it is the one meant and as it was written.

    Raises:
      DataError: it is damaged, or of another call, or another part; naming it.

    Cost: reads the part once.
    """
    with contextlib.ExitStack() as stack:
        with damage_named(path):
            archive = stack.enter_context(zipfile.ZipFile(path))
            _check_identity(path, _identity(archive, path), write, number, parts)
        yield archive


def _identity(archive: zipfile.ZipFile, path: Path) -> dict[str, Any]:
    """What the part says that it is, once all of it is seen to be as written."""
    infos = archive.infolist()
    if len({info.filename for info in infos}) < len(infos):
        raise ValueError("two of its entries have one name")
    # A size that is larger than the file is a lie, and would be believed below.
    claimed = sum(info.file_size for info in infos)
    if claimed > os.stat(path).st_size:
        raise ValueError(f"its entries claim {claimed} bytes, more than the file has")
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
        raise ValueError("an entry is compressed, which Keras does not do")
    if IDENTITY_NAME not in archive.namelist():
        raise ValueError(f"it has no {IDENTITY_NAME}: save_parts did not write it")
    identity = parse_json(archive.read(IDENTITY_NAME))
    if identity["format"] != PART_FORMAT:
        raise ValueError(f"its format is {identity['format']!r}")
    if identity["checksum"] != checksum_of(identity):
        raise ValueError(f"its {IDENTITY_NAME} was changed after it was written")
    found = {
        info.filename: _digest(archive, info)
        for info in infos
        if info.filename != IDENTITY_NAME
    }
    if found != identity["entries"]:
        changed = sorted(set(found.items()) ^ set(identity["entries"].items()))
        raise ValueError(f"{changed[0][0]} was changed after it was written")
    return identity


def _check_identity(
    path: Path, identity: Mapping[str, Any], write: str, number: int, parts: int
) -> None:
    found = (identity["write"], identity["part"], identity["parts"])
    if found != (write, number, parts):
        raise DataError(
            f"{path.name} does not belong here: it is part {found[1]} of {found[2]} of "
            f"the write {found[0]}, and the index needs part {number} of {parts} of "
            f"the write {write}. Parts of two calls of save_parts make no model. "
            "Bring the parts of one call into one directory, with its index."
        )


def _digest(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with archive.open(entry) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def damage_named(path: object, remedy: str = f" {REMEDY}.") -> Iterator[None]:
    """Whatever reading a file raises becomes a `DataError` that names the file.

    The readers of archives and of HDF5 raise a dozen types for changed bytes: struct's,
    zlib's, KeyError, RuntimeError, NotImplementedError...
    """
    try:
        yield
    except TfdpError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {str(error)[:300]}"
        raise DataError(f"{path} is damaged ({what}).{remedy}") from error
