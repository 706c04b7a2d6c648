"""`merge_parts`: one ordinary Keras file from what several hosts have written."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfdp.checkpoint.array_files import ArrayFile
from tfdp.checkpoint.hosts import Hosts
from tfdp.checkpoint.manifest import (
    FOLDER,
    UNFINISHED,
    Manifest,
    folders_newest_first,
    read_manifest,
)
from tfdp.checkpoint.model_description import model_of
from tfdp.checkpoint.parts import (
    IDENTITY_NAME,
    WEIGHTS_NAME,
    PartsIndex,
    checked_part,
    damage_named,
    read_index,
)
from tfdp.checkpoint.restored import check_parts, give_back, open_parts
from tfdp.data.places import Place, place_of
from tfdp.errors import CheckpointWarning, ConfigurationError, DataError, TfdpError
from tfdp.files.asked_for import refuse_bad_place
from tfdp.files.atomic import replaced, temporary
from tfdp.progress_bar import progress_bar


def merge_parts(
    directory: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    build: Callable[[], keras.Model] | None = None,
) -> Path:
    """Makes one file of what `save_parts`, or a `Checkpoint`, has written.

    Args:
      directory: where all parts and their index are; or a directory of
        `tfdp.callbacks.Checkpoint` or `tfdp.checkpoint.Checkpoint`, of which the newest
        checkpoint that is whole is taken; or one checkpoint in it.
      path: of the file to write, `.keras` for the model, or `.weights.h5` for
        `model.load_weights`. Replaced when it exists. Of what `save_parts` has written
        a `.keras` file holds the optimizer as well, of a checkpoint the weights only.
      build: makes the model that a checkpoint is of, built; None: Keras makes it from
        the description in the checkpoint, which can be where all layers are Keras' own
        or registered ones, and the model is not of a class of its own.

    Returns:
      The path.

    Raises:
      DataError: when the index or a part is missing or damaged, or a part is of another
        call of `save_parts`; naming it and what it is. When no checkpoint can be used,
        or the description does not suffice.
      ConfigurationError: when `path` cannot be written, or is one of the parts; when
        `build` makes another model, or is given where there is no checkpoint.

    Warns:
      CheckpointWarning: a checkpoint is damaged, and the one before was taken.

    Cost: reads every part twice, once for its checksum; holds one variable at a time in
    memory, of a checkpoint all weights.

    ```python
    import tempfile

    import keras
    import tfdp

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    folder = tempfile.mkdtemp()
    checkpoint = tfdp.checkpoint.Checkpoint(folder)
    checkpoint.save(model, step=1)
    checkpoint.wait()
    path = tfdp.checkpoint.merge_parts(folder, f"{folder}/model.keras")
    print(keras.models.load_model(path).count_params())  # 5
    ```
    """
    folder, target = place_of(directory), Path(path)
    if not target.name.endswith((".keras", ".weights.h5")):
        raise DataError(
            f"Parts are merged into a .keras or a .weights.h5 file. Received: {target}."
        )
    _check_target(target)
    if holds_checkpoints(folder):
        merge_checkpoint(folder, target, build)
        return target
    if build is not None:
        raise ConfigurationError(
            f"{folder} holds no checkpoint of a training, and parts of save_parts need "
            "no model: leave build (--model) out."
        )
    if not isinstance(folder, Path):
        raise DataError(f"{folder} holds no checkpoint of a training.")
    index = read_index(folder)
    parts_of_it = [os.path.realpath(folder / name) for name in index.names]
    if os.path.realpath(target) in parts_of_it:
        raise ConfigurationError(
            f"{target} is one of the parts that are to be merged, and would be lost. "
            "Give another name."
        )
    with contextlib.ExitStack() as stack:
        parts = [
            stack.enter_context(_open_part(folder / name, index, number))
            for number, name in enumerate(index.names, 1)
        ]
        if target.name.endswith(".weights.h5"):
            with written(target) as half_written:
                _join(parts, index, half_written)
            return target
        with (
            written(target) as half_written,
            temporary(target.with_name(WEIGHTS_NAME)) as weights,
        ):
            _join(parts, index, weights)
            _pack(parts[0], weights, half_written)
    return target


def _check_target(target: Path) -> None:
    try:
        is_there = target.parent.is_dir()
        target.exists()  # Raises for a name that is too long.
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"Nothing can be written there: {error}.") from error
    if not is_there:
        raise ConfigurationError(
            f"There is no folder {target.parent} to write {target.name} to. Make it."
        )
    refuse_bad_place("The file", str(target))


class _Part:
    """One part, open, checked: its archive and the numbers in it."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, weights: Any):
        self.path, self.archive, self.weights = path, archive, weights
        self.size_bytes = path.stat().st_size

    def value(self, place: str) -> np.ndarray:
        """The numbers at a place.

        Raises:
          DataError: there are none, or they are not within the part.
        """
        import h5py

        with damage_named(self.path):
            item = self.weights[place]
            if not isinstance(item, h5py.Dataset):
                raise ValueError(f"{place!r} holds no numbers")
            # HDF5 can name other files, and sizes that nothing was written for.
            if item.external or item.is_virtual or item.nbytes > self.size_bytes:
                raise ValueError(
                    f"{place!r} claims {item.nbytes} bytes that are not in the part"
                )
            return item[()]


@contextlib.contextmanager
def _open_part(path: Path, index: PartsIndex, number: int) -> Iterator[_Part]:
    import h5py

    with contextlib.ExitStack() as stack:
        archive = stack.enter_context(
            checked_part(path, index.write, number, index.parts)
        )
        with damage_named(path):
            # Stored, not packed: it can be read where it lies in the archive.
            file = stack.enter_context(archive.open(WEIGHTS_NAME))
            weights = stack.enter_context(h5py.File(file, "r"))
        yield _Part(path, archive, weights)


def _join(parts: list[_Part], index: PartsIndex, path: Path) -> None:
    """Writes the first part's numbers, those of all parts where they are sharded."""
    import h5py

    first = parts[0]
    found: list[tuple[str, Any]] = []
    with damage_named(first.path):
        first.weights.visititems(lambda place, item: found.append((place, item)))
    numbers = {place for place, item in found if isinstance(item, h5py.Dataset)}
    absent = sorted(set(index.sharded) - numbers)
    if absent:
        raise DataError(
            f"{first.path.name} has no numbers at {absent[0]!r}, which the index lists."
        )
    with (
        h5py.File(path, "w") as whole,
        progress_bar("merging parts", len(found)) as advance,
    ):
        whole.attrs.update(first.weights.attrs)
        for place, item in found:
            advance(1)
            if not isinstance(item, h5py.Dataset):
                whole.require_group(place).attrs.update(item.attrs)
                continue
            if place in index.sharded:
                value = _whole(place, parts, index.sharded[place])
            else:
                value = first.value(place)
            whole.create_dataset(place, data=value).attrs.update(item.attrs)


def _whole(place: str, parts: list[_Part], entry: Any) -> np.ndarray:
    pieces = [part.value(place) for part in parts]
    for piece, length, part in zip(pieces, entry["lengths"], parts, strict=True):
        if piece.shape != (length,) or piece.dtype != pieces[0].dtype:
            raise DataError(
                f"{part.path.name} holds {piece.dtype} {piece.shape} at {place!r} "
                f"where the index says ({length},) of one type: it is not a part of "
                "this checkpoint."
            )
    return np.concatenate(pieces).reshape(entry["shape"])


def _pack(first: _Part, weights: Path, path: Path) -> None:
    """The first part with other weights."""
    with zipfile.ZipFile(path, "w") as target:
        for entry in first.archive.infolist():
            if entry.filename == WEIGHTS_NAME:
                target.write(weights, WEIGHTS_NAME)
            elif entry.filename != IDENTITY_NAME:
                with damage_named(first.path):
                    content = first.archive.read(entry)
                target.writestr(entry, content)


# `merge_checkpoint`: one ordinary Keras file from a checkpoint of a training.


MODEL = "model/"


def holds_checkpoints(directory: Place) -> bool:
    """Whether a directory is one of `Checkpoint`'s, or a checkpoint in one."""
    is_one = FOLDER.fullmatch(directory.name) is not None
    return is_one or bool(folders_newest_first(directory))


def merge_checkpoint(
    directory: Place, target: Path, build: Callable[[], keras.Model] | None
) -> str:
    """Writes the weights of the newest checkpoint that is whole, in a Keras file.

    Args:
      directory: what `Checkpoint` was given; or the folder of one checkpoint in it.
      target: `.keras` or `.weights.h5`.
      build: makes the model; None: by the description in the checkpoint.

    Returns:
      The folder that was read.

    Raises:
      DataError: there is no checkpoint that can be used, naming what is damaged; or it
        does not describe its model, and there is no `build`.
      ConfigurationError: what `build` makes is another model.

    Warns:
      CheckpointWarning: for each newer checkpoint that cannot be used.
    """
    is_one = FOLDER.fullmatch(directory.name) is not None
    damaged = []
    for folder in [directory] if is_one else folders_newest_first(directory):
        try:
            with _opened(folder) as (manifest, files):
                model = _model(manifest, folder, build)
                give_back(model, files, manifest, ALONE, weights_only=True)
        except _Damaged as error:
            damaged.append(str(error))
            if UNFINISHED not in str(error) and not is_one:
                warnings.warn(
                    f"A checkpoint cannot be used, and the one before is taken: "
                    f"{error}",
                    CheckpointWarning,
                    stacklevel=3,
                )
            continue
        with written(target) as half_written:
            if target.name.endswith(".weights.h5"):
                model.save_weights(half_written)
            else:
                model.save(half_written)
        return str(folder)
    raise DataError(
        f"No checkpoint in {directory} can be merged: {' '.join(damaged)} Bring them "
        "again from where they were copied."
    )


@contextlib.contextmanager
def written(target: Path) -> Iterator[Path]:
    """As `replaced`; what the disk does not take is said with the file's name.

    Raises:
      ConfigurationError: `target` cannot be written.
    """
    try:
        with replaced(target) as half_written:
            yield half_written
    except TfdpError:
        raise
    except (OSError, RuntimeError) as error:
        # HDF5 says by a RuntimeError that a disk is full.
        raise ConfigurationError(
            f"{target} cannot be written ({error}). Give another place."
        ) from error


ALONE = Hosts(0, 1, None, lambda value, label: value)


class _Damaged(DataError):
    """A checkpoint that cannot be used, where the one before may be."""


@contextlib.contextmanager
def _opened(folder: Place) -> Iterator[tuple[Manifest, list[ArrayFile]]]:
    """The manifest and all parts, once every byte of them was looked at."""
    with contextlib.ExitStack() as stack:
        try:
            manifest = read_manifest(folder)
            files = stack.enter_context(open_parts(folder, manifest))
            check_parts(files, ALONE)
        except DataError as error:
            raise _Damaged(str(error)) from error
        yield manifest, files


def _model(
    manifest: Manifest, folder: Place, build: Callable[[], keras.Model] | None
) -> keras.Model:
    if build is None:
        places = sorted(
            int(name.removeprefix(MODEL))
            for name in manifest.entries
            if name.startswith(MODEL) and name.removeprefix(MODEL).isdecimal()
        )
        shapes = [manifest.entries[f"{MODEL}{place}"].shape for place in places]
        try:
            # A number takes a byte, or more: what is not in the parts is not made.
            if sum(map(math.prod, shapes)) > sum(manifest.sizes):
                raise DataError("it claims more numbers than its parts can hold")
            return model_of(manifest.architecture, shapes)
        except DataError as error:
            raise DataError(
                f"{folder} alone does not say which model it is of: {error}. Name what "
                "makes the model: tfdp merge --model script.py DIRECTORY PATH, or "
                "merge_parts(directory, path, build=build_model)."
            ) from error
    model = build()
    if not isinstance(model, keras.Model) or not model.built:
        raise ConfigurationError(
            "What makes the model must return a keras.Model that is built: give it an "
            f"Input, or build(shape). It returned: {model!r}."
        )
    return model
