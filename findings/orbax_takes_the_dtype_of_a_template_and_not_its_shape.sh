#!/usr/bin/env bash
# Orbax 0.12.8: restored with a template of NumPy arrays, weights are cut to the template's dtype
# without an error (300.7 is 44 in int8, NaN is 0), and come in the stored shape, whatever the
# template's is.
#
# Templates say how a state looks that is to be read. One of another shape is refused if it holds
# jax.Array, and not if it holds NumPy arrays, as those of Keras on TensorFlow are: who asks for
# four numbers gets the six that are there. The dtype is taken from both, and numbers are converted
# as C does: of a float32 kernel between -1 and 1 an int8 template leaves zeros. A good guess would
# be an error for each, as a model that was changed since the save must be told.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "orbax-checkpoint==0.12.8" "jax==0.10.2" "jaxlib==0.10.2"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import logging
import os
import tempfile
from importlib.metadata import version

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

logging.disable(logging.WARNING)
print("orbax-checkpoint", version("orbax-checkpoint"))
saved = {"kernel": np.array([0.3, -0.9, 300.7, np.nan, 1e6, 2.0], "float32")}
templates = {
    "NumPy, float32": np.zeros(6, "float32"),
    "NumPy, int8": np.zeros(6, "int8"),
    "NumPy, float16": np.zeros(6, "float16"),
    "NumPy, other shape": np.zeros((2, 2), "float32"),
    "JAX, int8": jnp.zeros(6, "int8"),
    "JAX, other shape": jnp.zeros((2, 2), "float32"),
}
seen = {}
with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
    path = os.path.join(folder, "step")
    checkpointer.save(path, saved)
    checkpointer.wait_until_finished()
    for name, template in templates.items():
        try:
            seen[name] = checkpointer.restore(path, {"kernel": template})["kernel"].tolist()
        except ValueError as error:
            seen[name] = f"ValueError: {str(error)[:30]}"
        print(f"{name:19}", seen[name])
if seen["NumPy, int8"][:3] != [0, 0, 44] or seen["JAX, int8"] != seen["NumPy, int8"]:
    raise SystemExit("changed")
if len(seen["NumPy, other shape"]) != 6 or "ValueError" not in seen["JAX, other shape"]:
    raise SystemExit("changed")
PYTHON
