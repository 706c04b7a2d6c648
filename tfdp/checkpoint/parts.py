"""`save_parts`: every host writes what it holds, none gathers the whole.

A part is a `.keras` file in which each sharded variable is this host's range of it,
flat. Which of the numbers in the file these are, and how they fit together, stands in
an index that the first host writes last: without it, or with a part missing, there is
no checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp.checkpoint.part_files import (
    INDEX_NAME,
    WEIGHTS_NAME,
    PartsIndex,
    note_identity,
    other_parts,
)
from tfdp.errors import CheckpointWarning, ConfigurationError, DataError
from tfdp.files.atomic import replaced, temporary
from tfdp.plan.shards import ShardLayout
from tfdp.sharding.variables import read_instead

__all__ = ["save_parts"]

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
