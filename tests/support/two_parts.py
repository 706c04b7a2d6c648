"""A checkpoint in two parts, without two hosts: as `save_parts` writes it on each."""

import zipfile

import h5py
import keras
import numpy as np

from tfdp.checkpoint.parts import (
    INDEX_NAME,
    WEIGHTS_NAME,
    PartsIndex,
    note_identity,
)
from tfdp.files.atomic import replaced


def saved_model(path, seed):
    """A Keras file with numbers of its own for each seed."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.fit(np.ones((4, 4)), np.ones((4, 3)), verbose=0)
    model.save(path)
    return path


def write_parts(whole, folder, write):
    """The two parts and the index of a Keras file.

    The kernel and its momentum are sharded, the rest is not.
    """
    folder.mkdir(exist_ok=True)
    sharded = {}
    with zipfile.ZipFile(whole) as archive:
        others = {
            name: archive.read(name)
            for name in archive.namelist()
            if name != WEIGHTS_NAME
        }
        (folder / WEIGHTS_NAME).write_bytes(archive.read(WEIGHTS_NAME))
    places = []
    with h5py.File(folder / WEIGHTS_NAME) as file:
        file.visititems(
            lambda place, item: places.append(place) if is_matrix(item) else None
        )
        for place in places:
            sharded[place] = {"shape": list(file[place].shape), "lengths": [7, 5]}
    index = PartsIndex(write, sharded, 2)
    for number, name in enumerate(index.names):
        weights = folder / "part.weights.h5"
        weights.write_bytes((folder / WEIGHTS_NAME).read_bytes())
        with h5py.File(weights, "r+") as file:
            for place in places:
                flat = file[place][()].reshape(-1)
                del file[place]
                file[place] = flat[:7] if number == 0 else flat[7:]
        with zipfile.ZipFile(folder / name, "w") as archive:
            for other, content in others.items():
                archive.writestr(other, content)
            archive.write(weights, WEIGHTS_NAME)
        note_identity(folder / name, write, number + 1, 2)
        weights.unlink()
    (folder / WEIGHTS_NAME).unlink()
    with replaced(folder / INDEX_NAME) as half_written:
        half_written.write_text(index.text())
    return index


def is_matrix(item):
    return isinstance(item, h5py.Dataset) and item.shape == (4, 3)


def content_of(path):
    """All that a merged file says: its numbers, and its other entries."""
    found = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name != WEIGHTS_NAME:
                found[name] = archive.read(name)
        with archive.open(WEIGHTS_NAME) as file, h5py.File(file) as weights:

            def note(place, item):
                attributes = sorted((key, str(item.attrs[key])) for key in item.attrs)
                is_data = isinstance(item, h5py.Dataset)
                numbers = (item.dtype, item[()].tolist()) if is_data else None
                found[place] = (attributes, numbers)

            weights.visititems(note)
    return found
