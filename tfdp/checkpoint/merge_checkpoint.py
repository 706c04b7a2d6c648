"""`merge_checkpoint`: one ordinary Keras file from a checkpoint of a training."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import keras

from tfdp.checkpoint.architecture import model_of
from tfdp.checkpoint.array_files import ArrayFile
from tfdp.checkpoint.hosts import Hosts
from tfdp.checkpoint.manifest import (
    FOLDER,
    UNFINISHED,
    Manifest,
    folders_newest_first,
    read_manifest,
)
from tfdp.checkpoint.restored import check_parts, give_back, open_parts
from tfdp.data.places import Place
from tfdp.errors import CheckpointWarning, ConfigurationError, DataError, TfdpError
from tfdp.files.atomic import replaced

__all__ = ["holds_checkpoints", "merge_checkpoint", "written"]

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
