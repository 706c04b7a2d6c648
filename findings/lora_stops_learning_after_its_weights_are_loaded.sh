#!/usr/bin/env bash
# Keras 3.15.1: a model with LoRA that loads its own saved weights cannot learn any more.
#
# save_weights stores the sum of the kernel and the product of the two LoRA matrices. load_weights
# puts the sum in the kernel, and zero in both matrices. The gradient of each is a product with the
# other one, so both stay zero for ever and the loss does not change; nothing is raised. enable_lora
# itself draws the first matrix at random for this reason. A whole model that is loaded with its
# Adam moves by the old moments at first. A good guess would be the training that went on before the
# save.
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

x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = x @ np.ones((4, 3), "float32")


def model_with_lora():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, use_bias=False)])
    model.layers[0].enable_lora(2)
    model.compile(keras.optimizers.Adam(0.05), "mse")
    return model


def losses(model):
    return model.fit(x, y, epochs=10, verbose=0).history["loss"]


print("keras", keras.__version__)
keras.utils.set_random_seed(0)
model, loaded = model_with_lora(), model_with_lora()
model.fit(x, y, epochs=3, verbose=0)
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "lora.weights.h5")
    model.save_weights(path)
    loaded.load_weights(path)
same = np.allclose(model.predict(x, verbose=0), loaded.predict(x, verbose=0), atol=1e-6)
print("predictions equal after load_weights:", same)
goes_on, stopped = losses(model), losses(loaded)
print("loss of ten more epochs, never saved:", goes_on[0], "...", goes_on[-1])
print("loss of ten more epochs, loaded:     ", stopped[0], "...", stopped[-1])
if not same or goes_on[-1] > 0.5 * goes_on[0] or not np.isclose(stopped[0], stopped[-1]):
    raise SystemExit("changed")
PYTHON
