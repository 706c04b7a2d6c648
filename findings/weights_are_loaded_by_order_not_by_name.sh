#!/usr/bin/env bash
# Keras 3.15.1: load_weights of a .weights.h5 gives a layer the weights of another one with another
# name, if the two have the same class and shape.
#
# In the file layers are called by their class and place: dense, dense_1. The names that the user
# gave are not there. A model of two towers, "user" and "item", whose inputs are listed in the other
# order, takes the user's weights for its item tower, without an error or a warning. Which place a
# layer has depends on the order of inputs and outputs and on the depth of the graph. A good guess
# would be by name, as by_name=True, which HDF5 files of Keras 2 had, or an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "tensorflow-cpu==2.21.0" "keras==3.15.1"
KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'PYTHON'
import os
import tempfile

import keras
import numpy as np


def towers(names):
    inputs = {name: keras.Input((2,), name=f"{name}_id") for name in names}
    outputs = [keras.layers.Dense(2, name=name)(inputs[name]) for name in names]
    return keras.Model(list(inputs.values()), keras.layers.Dot(1)(outputs))


print("keras", keras.__version__)
saved, loaded = towers(["user", "item"]), towers(["item", "user"])
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "towers.weights.h5")
    saved.save_weights(path)
    loaded.load_weights(path)
kernels = {name: np.asarray(saved.get_layer(name).kernel) for name in ("user", "item")}
for name in kernels:
    got = np.asarray(loaded.get_layer(name).kernel)
    (source,) = [key for key, kernel in kernels.items() if np.array_equal(kernel, got)]
    print(f"the tower {name!r} has got the weights of {source!r}")
    if source == name:
        raise SystemExit("changed")
PYTHON
