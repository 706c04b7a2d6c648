"""The Keras file within a checkpoint: what Keras saves of a model, without the values.

Only Keras determines where its file holds a variable. So a checkpoint holds the file
that Keras wrote while a mark replaced the value of each variable, and `tfdp merge`
writes the values there. It needs no code of the model, and runs none.

A mark is an empty array of shape (0, MARK, k), for entry k of the checkpoint.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp._private.keras_models import read_as
from tfdp.checkpoint.entries import Entry
from tfdp.checkpoint.manifest import KERAS_FILE, PROGRAM
from tfdp.cluster.scratch import scratch_folder

#: Keras' name for the weights within a .keras file.
WEIGHTS_NAME = "model.weights.h5"
MARK = 0x7F4A7C15
#: A larger file holds tables.
MOST_BYTES = 2**26
# Model -> the entries and the variables that were marked, and the file.
_kept: weakref.WeakKeyDictionary[keras.Model, tuple[list[tuple[str, int]], bytes]]
_kept = weakref.WeakKeyDictionary()


class _Mark:
    """Replaces the value of a variable: Keras stores the mark in its file.

    A config may hold the value as a number, such as the learning rate.
    """

    def __init__(self, variable: keras.Variable, number: int):
        self._value = variable.value
        dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
        self._mark = np.zeros((0, MARK, number), dtype)

    def numpy(self) -> _Mark:
        return self

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._mark

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        # A layer computes what it stores, as with LoRA.
        raise TypeError("A mark is no value.")

    def __float__(self) -> float:
        return float(tf.convert_to_tensor(self._value))


def keras_file_of(model: keras.Model, entries: Mapping[str, Entry]) -> bytes | None:
    """The .keras file of a model with marks; call it on all hosts.

    If Keras can save the weights alone, the file holds nothing else; None: Keras can
    save neither, or the file is too large.

    Cost: made once per compiled model if all values are marks; 0.5 s and 0.8 MB for a
    ResNet50 with Adam, on a busy machine.
    """
    variables = [entries[name].variable for name in marked_names(entries)]
    key = list(zip(marked_names(entries), map(id, variables), strict=True))
    if model in _kept and _kept[model][0] == key:
        return _kept[model][1]
    content = None
    with (
        contextlib.suppress(Exception),
        scratch_folder() as folder,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        path = _written(model, variables, Path(folder))
        if path.stat().st_size <= MOST_BYTES:
            content = path.read_bytes()
            if _has_marks_only(path):
                _kept[model] = key, content
    return content


def marked_names(names: Iterable[str]) -> list[str]:
    """The names of the entries that marks refer to, by number."""
    return sorted(n for n in names if n != KERAS_FILE and not n.startswith(PROGRAM))


def _written(model: keras.Model, variables: list[Any], folder: Path) -> Path:
    marks = [(v, _Mark(v, k)) for k, v in enumerate(variables) if v is not None]
    path, weights = folder / "model.keras", folder / WEIGHTS_NAME
    with read_as(marks):
        try:
            keras.saving.save_model(model, path)
        except Exception:
            # Such as a class without `get_config`.
            model.save_weights(weights)
            with zipfile.ZipFile(path, "w") as archive:
                archive.write(weights, WEIGHTS_NAME)
    return path


def _has_marks_only(path: Path) -> bool:
    with open_weights(path) as (_, weights):
        found = [item for _, item in items_of(weights) if is_dataset(item)]
    return all(mark_number(item) is not None for item in found)


@contextlib.contextmanager
def open_weights(file: Any) -> Iterator[tuple[zipfile.ZipFile, Any]]:
    """Opens a .keras file, a path or a stream, and the HDF5 file within."""
    import h5py

    with (
        zipfile.ZipFile(file) as archive,
        archive.open(WEIGHTS_NAME) as stored,
        h5py.File(stored, "r") as weights,
    ):
        yield archive, weights


def items_of(weights: Any) -> list[tuple[str, Any]]:
    """All groups and datasets of an HDF5 file with their places."""
    found: list[tuple[str, Any]] = []
    weights.visititems(lambda place, item: found.append((place, item)))
    return found


def is_dataset(item: Any) -> bool:
    """Whether an item of an HDF5 file holds values."""
    import h5py

    return isinstance(item, h5py.Dataset)


def mark_number(item: Any) -> int | None:
    """The number of the mark in a dataset; None: it is none."""
    shape = item.shape
    return int(shape[2]) if len(shape) == 3 and shape[:2] == (0, MARK) else None
