#!/usr/bin/env bash
# Keras 3.15.1: exclude_from_weight_decay(var_names=[...]) searches for the names in the whole path
# of a weight on TensorFlow, and in its last part only on JAX.
#
# ["layer_norm", "bias"] excludes the layer "layer_norm" on TensorFlow. On JAX it excludes no weight
# of it, because these are called "gamma" and "beta", and all decay, without a word. On TensorFlow
# the name of the model is searched too: in a model with the name "debiased" the word "bias"
# excludes every weight. A good guess would be the same text on each backend, and not the model's
# name. A list of variables (var_list=) is the same on both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
  "tensorflow-cpu==2.21.0" "keras==3.15.1" "jax==0.10.2" "jaxlib==0.10.2"
cat > "$folder/program.py" <<'PYTHON'
import keras
import numpy as np


def excluded(name, **words):
    layer = keras.layers.LayerNormalization(name="layer_norm")
    keras.Sequential([keras.Input((2,)), layer], name=name)
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(**(words or {"var_list": [layer.gamma]}))
    optimizer.build([layer.gamma])
    optimizer.apply([keras.ops.zeros((2,))], [layer.gamma])
    return bool(np.asarray(layer.gamma)[0] == 1.0)


on_tensorflow = keras.backend.backend() == "tensorflow"
print("keras", keras.__version__, keras.backend.backend())
seen = (
    excluded("model", var_names=["layer_norm"]),
    excluded("model", var_names=["bias"]),
    excluded("debiased", var_names=["bias"]),
    excluded("model"),
)
print("is gamma of the layer excluded by the layer's name:           ", seen[0])
print("by the word bias, in a model with the name model:             ", seen[1])
print("by the word bias, in a model with the name debiased:          ", seen[2])
print("by var_list=[gamma]:                                          ", seen[3])
if seen != (on_tensorflow, False, on_tensorflow, True):
    raise SystemExit("changed")
PYTHON
for backend in tensorflow jax; do
  KERAS_BACKEND=$backend JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3 \
    "$folder/venv/bin/python" "$folder/program.py"
done
