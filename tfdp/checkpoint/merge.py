"""`merge_parts`: one ordinary Keras file from the parts of a checkpoint."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdp.checkpoint.array_files import ArrayFile, damage_as_data_error
from tfdp.checkpoint.hosts import Hosts
from tfdp.checkpoint.keras_file import (
    WEIGHTS_NAME,
    is_dataset,
    items_of,
    mark_number,
    marked_names,
    open_weights,
)
from tfdp.checkpoint.manifest import (
    FOLDER,
    KERAS_FILE,
    UNFINISHED,
    Manifest,
    folders_newest_first,
    read_manifest,
)
from tfdp.checkpoint.restored import check_parts, open_parts, whole_of
from tfdp.data.places import Place, place_of
from tfdp.errors import CheckpointWarning, ConfigurationError, DataError, TfdpError
from tfdp.files.asked_for import check_output_path
from tfdp.files.atomic import replaced, temporary
from tfdp.progress_bar import progress_bar

ALONE = Hosts(0, 1, None, lambda value, label: value)
INSTEAD = (
    "Restore it into the model in a program, and save that: "
    "tfdp.checkpoint.Checkpoint(directory).restore(model, weights_only=True)"
)


def merge_parts(
    directory: str | os.PathLike[str], path: str | os.PathLike[str]
) -> Path:
    """Writes one Keras file from a checkpoint, as `model.save` would have.

    It needs neither the model's code nor the hosts that wrote the checkpoint, and runs
    no code from it.

    Args:
      directory: of `tfdp.callbacks.Checkpoint` or `tfdp.checkpoint.Checkpoint`, to use
        the newest whole checkpoint; or one checkpoint.
      path: the file to write or replace: `.keras` for the model with its optimizer, or
        `.weights.h5` for `model.load_weights`.

    Returns:
      The path.

    Raises:
      DataError: no checkpoint can be used; or Keras could not save the model.
      ConfigurationError: `path` cannot be written.

    Warns:
      CheckpointWarning: a checkpoint is damaged, and the one before is used.

    Cost: reads every part twice, once for its checksums; holds one variable at a time.

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
    is_one = FOLDER.fullmatch(folder.name) is not None
    folders = [folder] if is_one else folders_newest_first(folder)
    if not folders:
        raise DataError(
            f"{folder} holds no checkpoint. Give the directory of "
            "tfdp.callbacks.Checkpoint or tfdp.checkpoint.Checkpoint."
        )
    damaged: list[str] = []
    for one in folders:
        with contextlib.ExitStack() as stack:
            try:
                manifest = read_manifest(one)
                files = stack.enter_context(open_parts(one, manifest))
                check_parts(files, ALONE)
            except DataError as error:
                damaged.append(str(error))
                if UNFINISHED not in str(error) and not is_one:
                    text = "A checkpoint cannot be used; trying the one before it:"
                    warnings.warn(f"{text} {error}", CheckpointWarning, stacklevel=2)
                continue
            _merge(one, manifest, files, target)
            return target
    raise DataError(
        f"No checkpoint in {folder} can be merged: {' '.join(damaged)} Copy them from "
        "their source again."
    )


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


def _merge(
    folder: Place, manifest: Manifest, files: Sequence[ArrayFile], target: Path
) -> None:
    if KERAS_FILE not in manifest.entries:
        raise DataError(f"Keras could not save the model of {folder}. {INSTEAD}.")
    content = files[0].read(KERAS_FILE).tobytes()
    with contextlib.ExitStack() as stack:
        with damage_as_data_error(folder):
            opened = open_weights(io.BytesIO(content))
            archive, marked = stack.enter_context(opened)
            _check_entries(archive, len(content))
        half_written = stack.enter_context(_written(target))
        if target.name.endswith(".weights.h5"):
            _join(folder, manifest, files, marked, half_written)
            return
        if len(archive.namelist()) == 1:
            raise DataError(
                f"Keras could save only the weights of the model of {folder}, as of a "
                "class without get_config. Merge them into a .weights.h5 file."
            )
        with temporary(target.with_name(WEIGHTS_NAME)) as weights:
            _join(folder, manifest, files, marked, weights)
            with zipfile.ZipFile(half_written, "w") as whole:
                for entry in archive.infolist():
                    if entry.filename == WEIGHTS_NAME:
                        whole.write(weights, WEIGHTS_NAME)
                    else:
                        whole.writestr(entry, archive.read(entry))


def _check_entries(archive: zipfile.ZipFile, size_bytes: int) -> None:
    """Refuses a size beyond the file."""
    infos = archive.infolist()
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
        raise ValueError("an entry is compressed, which Keras does not do")
    if sum(info.file_size for info in infos) > size_bytes:
        raise ValueError("its entries list more bytes than the file has")


def _join(
    folder: Place,
    manifest: Manifest,
    files: Sequence[ArrayFile],
    marked: Any,
    path: Path,
) -> None:
    """Writes the weights with the checkpoint's values in the place of marks."""
    import h5py

    names = marked_names(manifest.entries)
    with damage_as_data_error(folder):
        found = items_of(marked)
    with (
        h5py.File(path, "w") as whole,
        progress_bar("merging parts", len(found)) as advance,
    ):
        whole.attrs.update(marked.attrs)
        for place, item in found:
            advance(1)
            if not is_dataset(item):
                whole.require_group(place).attrs.update(item.attrs)
                continue
            with damage_as_data_error(folder):
                number = mark_number(item)
                if number is None:
                    value = _stored(place, item)
                else:
                    name = names[number]
                    value = whole_of(name, manifest.entries[name], files)
            whole.create_dataset(place, data=value).attrs.update(item.attrs)


def _stored(place: str, item: Any) -> np.ndarray:
    """The value that Keras stored, of no variable."""
    # HDF5 can refer to other files, and to sizes without content.
    if item.external or item.is_virtual or item.nbytes > item.file.id.get_filesize():
        raise ValueError(f"{place!r} lists {item.nbytes} bytes that are not there")
    return item[()]


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
