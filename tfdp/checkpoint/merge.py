"""`merge_parts`: one ordinary Keras file from the parts of several hosts."""

from __future__ import annotations

import contextlib
import math
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

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
    REMEDY,
    WEIGHTS_NAME,
    PartsIndex,
    checked_part,
    damage_as_data_error,
    read_index,
)
from tfdp.checkpoint.restored import check_parts, open_parts, restore_entries
from tfdp.data.places import Place, place_of
from tfdp.errors import CheckpointWarning, ConfigurationError, DataError, TfdpError
from tfdp.files.asked_for import check_output_path
from tfdp.files.atomic import replaced, temporary
from tfdp.progress_bar import progress_bar

MODEL = "model/"
ALONE = Hosts(0, 1, None, lambda value, label: value)


def merge_parts(
    directory: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    build: Callable[[], keras.Model] | None = None,
) -> Path:
    """Writes one Keras file from what `save_parts` or a `Checkpoint` has written.

    Args:
      directory: of the parts and their index; or of `tfdp.callbacks.Checkpoint` or
        `tfdp.checkpoint.Checkpoint`, to use the newest whole checkpoint; or one
        checkpoint.
      path: the file to write or replace: `.keras` for a model, or `.weights.h5` for
        `model.load_weights`. From `save_parts`, a `.keras` file includes the optimizer;
        from a checkpoint, weights only.
      build: returns the checkpoint's model, built; None: Keras builds it from the
        description in the checkpoint, if all layers are Keras' own or registered and
        the model is not subclassed.

    Returns:
      The path.

    Raises:
      DataError: the index or a part is missing, damaged or of another call; no
        checkpoint can be used; or the description does not suffice.
      ConfigurationError: `path` cannot be written, or is one of the parts; `build`
        makes another model, or there is no checkpoint for it.

    Warns:
      CheckpointWarning: a checkpoint is damaged, and the one before is used.

    Cost: reads every part twice, once for its checksum; holds one variable at a time in
    memory, for a checkpoint all weights.

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
    if FOLDER.fullmatch(folder.name) or folders_newest_first(folder):
        _merge_checkpoint(folder, target, build)
        return target
    if build is not None:
        raise ConfigurationError(
            f"{folder} holds no checkpoint: parts of save_parts need no model (build)."
        )
    if not isinstance(folder, Path):
        raise DataError(f"{folder} holds no checkpoint.")
    index = read_index(folder)
    parts_of_it = [os.path.realpath(folder / name) for name in index.names]
    if os.path.realpath(target) in parts_of_it:
        raise ConfigurationError(f"{target} is a part to merge. Give another name.")
    with contextlib.ExitStack() as stack:
        parts = [
            stack.enter_context(_open_part(folder / name, index, number))
            for number, name in enumerate(index.names, 1)
        ]
        with _written(target) as half_written:
            if target.name.endswith(".weights.h5"):
                _join(parts, index, half_written)
            else:
                with temporary(target.with_name(WEIGHTS_NAME)) as weights:
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
    check_output_path("The file", str(target))


class _Part:
    """An open, checked part: its archive and the arrays in it."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, weights: Any):
        self.path, self.archive, self.weights = path, archive, weights
        self.size_bytes = path.stat().st_size

    def value(self, place: str) -> np.ndarray:
        """The array at `place`; `DataError` if it is not within the part."""
        import h5py

        with damage_as_data_error(self.path, REMEDY):
            item = self.weights[place]
            if not isinstance(item, h5py.Dataset):
                raise ValueError(f"{place!r} holds no numbers")
            # HDF5 can refer to other files, and to sizes without content.
            if item.external or item.is_virtual or item.nbytes > self.size_bytes:
                raise ValueError(
                    f"{place!r} lists {item.nbytes} bytes that are not in the part"
                )
            return item[()]


@contextlib.contextmanager
def _open_part(path: Path, index: PartsIndex, number: int) -> Iterator[_Part]:
    import h5py

    with contextlib.ExitStack() as stack:
        part = checked_part(path, index.write, number, index.parts)
        archive = stack.enter_context(part)
        with damage_as_data_error(path, REMEDY):
            # Stored uncompressed: readable in place.
            file = stack.enter_context(archive.open(WEIGHTS_NAME))
            weights = stack.enter_context(h5py.File(file, "r"))
        yield _Part(path, archive, weights)


def _join(parts: list[_Part], index: PartsIndex, path: Path) -> None:
    """Writes the first part's arrays, joining the sharded ones from all parts."""
    import h5py

    first = parts[0]
    found: list[tuple[str, Any]] = []
    with damage_as_data_error(first.path, REMEDY):
        first.weights.visititems(lambda place, item: found.append((place, item)))
    numbers = {place for place, item in found if isinstance(item, h5py.Dataset)}
    missing = sorted(set(index.sharded) - numbers)
    if missing:
        raise DataError(
            f"{first.path.name} lacks the numbers at {missing[0]!r} in the index."
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
            sharded = index.sharded.get(place)
            value = _whole(place, parts, sharded) if sharded else first.value(place)
            whole.create_dataset(place, data=value).attrs.update(item.attrs)


def _whole(place: str, parts: list[_Part], entry: Any) -> np.ndarray:
    pieces = [part.value(place) for part in parts]
    for piece, length, part in zip(pieces, entry["lengths"], parts, strict=True):
        if piece.shape != (length,) or piece.dtype != pieces[0].dtype:
            raise DataError(
                f"{part.path.name} holds {piece.dtype} {piece.shape} at {place!r}, not "
                f"({length},) as in the index: it belongs to another checkpoint."
            )
    return np.concatenate(pieces).reshape(entry["shape"])


def _pack(first: _Part, weights: Path, path: Path) -> None:
    """Writes the first part with other weights."""
    with zipfile.ZipFile(path, "w") as target:
        for entry in first.archive.infolist():
            if entry.filename == WEIGHTS_NAME:
                target.write(weights, WEIGHTS_NAME)
            elif entry.filename != IDENTITY_NAME:
                with damage_as_data_error(first.path, REMEDY):
                    content = first.archive.read(entry)
                target.writestr(entry, content)


def _merge_checkpoint(
    directory: Place, target: Path, build: Callable[[], keras.Model] | None
) -> None:
    """Writes the weights of the newest usable checkpoint to `target`."""
    is_one = FOLDER.fullmatch(directory.name) is not None
    damaged = []
    for folder in [directory] if is_one else folders_newest_first(directory):
        with contextlib.ExitStack() as stack:
            try:
                manifest = read_manifest(folder)
                files = stack.enter_context(open_parts(folder, manifest))
                check_parts(files, ALONE)
            except DataError as error:
                damaged.append(str(error))
                if UNFINISHED not in str(error) and not is_one:
                    text = "A checkpoint cannot be used; trying the one before it:"
                    warnings.warn(f"{text} {error}", CheckpointWarning, stacklevel=3)
                continue
            model = _model(manifest, folder, build)
            restore_entries(model, files, manifest, ALONE, weights_only=True)
        with _written(target) as half_written:
            if target.name.endswith(".weights.h5"):
                model.save_weights(half_written)
            else:
                model.save(half_written)
        return
    raise DataError(
        f"No checkpoint in {directory} can be merged: {' '.join(damaged)} Copy them "
        "from their source again."
    )


@contextlib.contextmanager
def _written(target: Path) -> Iterator[Path]:
    """Wraps `replaced`; a disk error becomes a `ConfigurationError` with the name."""
    try:
        with replaced(target) as half_written:
            yield half_written
    except TfdpError:
        raise
    except (OSError, RuntimeError) as error:
        # HDF5 raises a RuntimeError for a full disk.
        raise ConfigurationError(
            f"{target} cannot be written ({error}). Give another place."
        ) from error


def _model(
    manifest: Manifest, folder: Place, build: Callable[[], keras.Model] | None
) -> keras.Model:
    if build is None:
        names = [n for n in manifest.entries if re.fullmatch(rf"{MODEL}\d+", n)]
        names.sort(key=lambda name: int(name.removeprefix(MODEL)))
        shapes = [manifest.entries[name].shape for name in names]
        try:
            # A number takes at least a byte: do not allocate more than there is.
            if sum(map(math.prod, shapes)) > sum(manifest.sizes):
                raise DataError("it lists more numbers than its parts can hold")
            return model_of(manifest.architecture, shapes)
        except DataError as error:
            raise DataError(
                f"{folder} does not describe its model: {error}. Name a function that "
                "builds the model: tfdp merge --model script.py DIRECTORY PATH, or "
                "merge_parts(directory, path, build=build_model)."
            ) from error
    model = build()
    if not isinstance(model, keras.Model) or not model.built:
        raise ConfigurationError(
            "The build function must return a built keras.Model: give it an Input, or "
            f"call build(shape). It returned: {model!r}."
        )
    return model
