#!/usr/bin/env bash
# safetensors 0.8.0: load_file gives tensors in another order than the dict that was saved, so that
# set_weights(list(load_file(path).values())) puts weights where they do not belong.
#
# The file is sorted by the size of the dtype, and then by name as text: "layer10" comes before
# "layer2". With layers of one shape nothing is raised, and up to ten layers of one dtype all is
# right. safe_open(...).keys() has a third order. A good guess would be the order of the dict, as
# dicts, npz and JSON keep it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "safetensors==0.8.0" "numpy==2.4.6"
"$folder/venv/bin/python" - <<'PYTHON'
import os
import tempfile
from importlib.metadata import version

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file


def orders(tensors):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.safetensors")
        save_file(tensors, path)
        with safe_open(path, "np") as file:
            return list(load_file(path)), list(file.keys())


print("safetensors", version("safetensors"))
layers = {f"layer{i}": np.ones(2, "float32") for i in (1, 2, 10)}
mixed = {"a": np.ones(1, "float16"), "b": np.ones(1, "float32"), "c": np.ones(1, "float64")}
for tensors in (layers, mixed):
    loaded, keys = orders(tensors)
    print("saved", list(tensors), "loaded", loaded, "safe_open", keys)
    if sorted(loaded) != sorted(tensors) or loaded == list(tensors):
        raise SystemExit("changed")
PYTHON
