"""`merge_parts`: one ordinary Keras file from the parts that several hosts wrote."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdp.atomic_files import replaced
from tfdp.checkpoint.parts import INDEX_NAME, WEIGHTS_NAME
from tfdp.errors import DataError

__all__ = ["merge_parts"]


def merge_parts(
    directory: str | os.PathLike[str], path: str | os.PathLike[str]
) -> Path:
    """Makes one file of what `save_parts` has written.

    Args:
      directory: where all parts and their index are.
      path: of the file to write, `.keras` for the model with its optimizer, or
        `.weights.h5` for `model.load_weights`. Replaced when it exists.

    Returns:
      The path.

    Raises:
      DataError: when the index or a part is missing, or a part is not what the index
        says; naming it.

    Cost: reads every part once; holds one variable at a time in memory.
    """
    folder, target = Path(directory), Path(path)
    if not target.name.endswith((".keras", ".weights.h5")):
        raise DataError(
            f"Parts are merged into a .keras or a .weights.h5 file. Received: {target}."
        )
    index = _read_index(folder)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        weights = Path(scratch) / WEIGHTS_NAME
        with contextlib.ExitStack() as stack:
            parts = [
                stack.enter_context(_open_weights(folder / name))
                for name in index["parts"]
            ]
            _join(parts, index, weights)
        if target.name.endswith(".weights.h5"):
            os.replace(weights, target)
            return target
        with replaced(target) as half_written:
            _pack(folder / index["parts"][0], weights, half_written)
    return target


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads((folder / INDEX_NAME).read_text())
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} has no {INDEX_NAME}: tfdp.checkpoint.save_parts, which writes "
            "it last, has not ended there on the first host."
        ) from error
    missing = [name for name in index["parts"] if not (folder / name).exists()]
    if missing:
        raise DataError(
            f"{folder} lacks {', '.join(missing)} of {len(index['parts'])} parts. "
            "Bring the files of all hosts into one directory."
        )
    return index


@contextlib.contextmanager
def _open_weights(path: Path) -> Any:
    import h5py

    # Stored, not packed: the file can be read where it lies in the archive.
    with (
        zipfile.ZipFile(path) as archive,
        archive.open(WEIGHTS_NAME) as file,
        h5py.File(file, "r") as weights,
    ):
        yield weights


def _join(parts: Sequence[Any], index: dict[str, Any], path: Path) -> None:
    """Writes the first part's numbers, those of all parts where they are sharded."""
    import h5py

    sharded = index["sharded"]

    def copy(place: str, item: Any) -> None:
        if not isinstance(item, h5py.Dataset):
            group = whole.require_group(place)
            group.attrs.update(item.attrs)
            return
        value = item[()]
        if place in sharded:
            pieces = [part[place][()] for part in parts]
            value = _whole(place, pieces, sharded[place], index["parts"])
        whole.create_dataset(place, data=value).attrs.update(item.attrs)

    with h5py.File(path, "w") as whole:
        whole.attrs.update(parts[0].attrs)
        parts[0].visititems(copy)


def _whole(
    place: str, pieces: Sequence[np.ndarray], entry: Any, names: Sequence[str]
) -> np.ndarray:
    for piece, length, name in zip(pieces, entry["lengths"], names, strict=True):
        if piece.shape != (length,):
            raise DataError(
                f"{name} holds {piece.shape} at {place!r} where the index says "
                f"({length},): it is not a part of this checkpoint."
            )
    return np.concatenate(pieces).reshape(entry["shape"])


def _pack(first_part: Path, weights: Path, path: Path) -> None:
    """The first part with other weights."""
    with (
        zipfile.ZipFile(first_part) as source,
        zipfile.ZipFile(path, "w") as target,
    ):
        for entry in source.infolist():
            if entry.filename == WEIGHTS_NAME:
                target.write(weights, WEIGHTS_NAME)
            else:
                target.writestr(entry, source.read(entry))
