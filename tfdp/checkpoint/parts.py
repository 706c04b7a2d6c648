"""`save_parts`: every host writes the shards that it holds; no host gathers them.

    parts.json                       the index: names, and what the parts hold
    part-1-of-2-<write>.keras        a Keras file and, in it, `tfdp.json`

In a part, each sharded variable is this host's flat range. `<write>` is drawn per call,
the same on all hosts. The index, which the first host writes last, and each part's
`tfdp.json` hold it; `tfdp.json` also holds the part's number and checksums, so a file
of another call, another part, or a changed byte is refused under any file name.
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

# Two integers that no weights hold: (MARK, k) marks variable k.
MARK = 0x7F4A7C15F39CC060
INDEX_NAME = "parts.json"
# Keras' file name for the weights within a .keras file.
WEIGHTS_NAME = "model.weights.h5"
IDENTITY_NAME = "tfdp.json"
INDEX_FORMAT, PART_FORMAT = "tfdp.parts/2", "tfdp.part/1"
PART_NAME = re.compile(r"part-\d{1,9}-of-\d{1,9}-(?P<write>[0-9a-f]{15})\.keras")
MOST_PARTS = 100_000
BLOCK_BYTES = 2**20
REMEDY = "Copy it from its host again, or save the model again."


def save_parts(model: keras.Model, directory: str | os.PathLike[str]) -> Path:
    """Writes a model with its optimizer state, one file per host.

    Call it on every host. `tfdp merge DIRECTORY model.keras` (or `merge_parts`) makes
    one ordinary file of the parts, for any number of replicas or plain Keras. Parts of
    earlier calls stay valid until all new parts are on disk; then they are deleted.

    Args:
      model: a built model, made in the scope of a strategy of tfdp.
      directory: created if missing; shared, or its files are collected before merging.

    Returns:
      The directory.

    Raises:
      ConfigurationError: the model is of another scope, or the directory cannot be
        created.
      DataError: on several hosts, one could not write; the same error on all. Parts of
        earlier calls are unchanged.

    Warns:
      CheckpointWarning: all is written, but a part of an earlier call is left.

    Cost: each of H hosts writes n / H of n sharded bytes and all replicated ones, and
    reads them once for their checksum. No host holds more than in training. With
    `shard_group="host"` the first host writes everything.

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
        parts = shards.reducer.transport.shard_parts // local
        mine = shards.part_of(0) // local
    # Parts of two calls must not be combined.
    key = int(strategy.from_chief(np.array(secrets.randbits(60)), "name of the parts"))
    write = f"{key:015x}"
    index = PartsIndex(write, {}, parts)
    folder = Path(directory)
    try:
        with _on_all_hosts(strategy, folder, "all parts of the checkpoint"):
            _make(folder)
            # Listed before another host can start the next call.
            found = map(PART_NAME.fullmatch, os.listdir(folder))
            before = [folder / m[0] for m in found if m and m["write"] != write]
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
                f"The parts in {folder} are complete, but {path.name} of an earlier "
                f"call could not be deleted ({type(error).__name__}: {error}).",
                CheckpointWarning,
                stacklevel=2,
            )
    return folder


@contextlib.contextmanager
def _on_all_hosts(strategy: Any, folder: Path, label: str) -> Iterator[None]:
    """Waits for all hosts at its end; an error on one becomes the same on all."""
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    words = "" if own is None else f"{type(own).__name__}: {str(own)[:300]}"
    texts = strategy.gather_bytes(words.encode(), label)
    if own is not None and len(texts) == 1:
        raise own
    failed = [f"worker {r} ({why.decode()})" for r, why in enumerate(texts) if why]
    if failed:
        raise DataError(
            f"The parts of the model were not written to {folder}, because of "
            f"{'; '.join(failed)}. Parts of earlier calls are unchanged."
        ) from own


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"Cannot create the directory {str(folder)[:300]!r} for the parts: {error}."
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
    """Shape and part lengths of each sharded variable, by its place in the file.

    Only Keras determines where it stores a variable: so we save the model once more
    with a mark instead of each.
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


@dataclass(frozen=True)
class PartsIndex:
    """The index of a checkpoint in parts."""

    write: str  # the identity of the call, 15 hexadecimal digits
    # Place in the weights file -> the whole `shape` and the parts' `lengths`.
    sharded: Mapping[str, Mapping[str, Any]]
    parts: int

    @property
    def names(self) -> list[str]:
        return part_names(self.write, self.parts)

    def text(self) -> str:
        content = {"write": self.write, "parts": self.names, "sharded": self.sharded}
        return with_checksum({"format": INDEX_FORMAT, **content})


def part_names(write: str, parts: int) -> list[str]:
    """The file names of the parts."""
    return [f"part-{i + 1}-of-{parts}-{write}.keras" for i in range(parts)]


def read_index(folder: Path) -> PartsIndex:
    """The index of a folder; `DataError` if it or a part is missing or damaged."""
    path = folder / INDEX_NAME
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError as error:
        if not folder.is_dir():
            raise DataError(f"There is no folder {folder}.") from error
        if not any(folder.iterdir()):
            raise DataError(
                f"The folder {folder} is empty. Give the directory of "
                "tfdp.checkpoint.save_parts or tfdp.callbacks.Checkpoint."
            ) from error
        raise DataError(
            f"{folder} has no {INDEX_NAME}: tfdp.checkpoint.save_parts, which writes "
            "it last, has not finished on the first host."
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}). {REMEDY}") from error
    index = _index_of(path, content)
    missing = [name for name in index.names if not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"{folder} lacks {', '.join(missing[:10])} of {index.parts} parts. "
            "Put the files of all hosts into one directory."
        )
    return index


def _index_of(path: Path, content: Any) -> PartsIndex:
    if isinstance(content, dict) and "format" not in content and "parts" in content:
        raise DataError(
            f"{path} was written by a version of tfdp without checksums of parts. "
            "Merge it with that version, or save the model again."
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
            raise ValueError("its parts are not a list of names")
        are_names = isinstance(write, str) and names == part_names(write, len(names))
        if not are_names or not all(map(PART_NAME.fullmatch, names)):
            raise ValueError("its parts have names that save_parts does not give")
        for place, entry in sharded.items():
            _check_entry(place, entry, len(names))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(
            f"{path} is not what save_parts writes ({type(error).__name__}: "
            f"{str(error)[:300]}). {REMEDY}"
        ) from error
    return PartsIndex(write, sharded, len(names))


def _check_entry(place: str, entry: Mapping[str, Any], parts: int) -> None:
    shape, lengths = entry["shape"], entry["lengths"]
    if not all(is_count(number) for number in (*shape, *lengths)):
        raise ValueError(f"sizes at {place!r} are not whole numbers")
    if len(lengths) != parts or sum(lengths) != math.prod(shape):
        raise ValueError(f"the pieces at {place!r} do not make up the whole")


def note_identity(path: Path, write: str, number: int, parts: int) -> None:
    """Adds `tfdp.json` to a part: its identity, and checksums of everything else."""
    with zipfile.ZipFile(path, "a") as archive:
        entries = {
            entry.filename: _digest(archive, entry) for entry in archive.infolist()
        }
        identity = {"format": PART_FORMAT, "write": write, "part": number}
        identity |= {"parts": parts, "entries": entries}
        archive.writestr(IDENTITY_NAME, with_checksum(identity))


@contextlib.contextmanager
def checked_part(path: Path, write: str, number: int, parts: int) -> Iterator[Any]:
    """The open archive of the part, or `DataError`; reads it once for its checksums."""
    with contextlib.ExitStack() as stack:
        with damage_as_data_error(path, REMEDY):
            archive = stack.enter_context(zipfile.ZipFile(path))
            _check_identity(path, _identity(archive, path), write, number, parts)
        yield archive


def _identity(archive: zipfile.ZipFile, path: Path) -> dict[str, Any]:
    """The identity of a part, after verifying its checksums."""
    infos = archive.infolist()
    if len({info.filename for info in infos}) < len(infos):
        raise ValueError("two of its entries have one name")
    # A size beyond the file would be trusted below.
    claimed = sum(info.file_size for info in infos)
    if claimed > os.stat(path).st_size:
        raise ValueError(f"its entries list {claimed} bytes, more than the file has")
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
            f"the write {write}. Put the parts of one call of save_parts into one "
            "directory, with its index."
        )


def _digest(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with archive.open(entry) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def damage_as_data_error(path: object, remedy: str = "") -> Iterator[None]:
    """Turns any error of reading a file into a `DataError` with its name.

    Archive and HDF5 readers raise a dozen types for changed bytes, such as KeyError,
    RuntimeError, struct.error and zlib.error.
    """
    try:
        yield
    except TfdpError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {str(error)[:300]}"
        raise DataError(f"{path} is damaged ({what}). {remedy}".rstrip()) from error
