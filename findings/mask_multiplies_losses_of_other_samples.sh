#!/usr/bin/env bash
# Keras 3.15.1: a mask of time steps meets a loss with one number per sample (Dice or Tversky with
# axis=). The loss is not masked: padded steps count in each sample's number. Then these B numbers
# are multiplied by the B x T mask as NumPy broadcasts, along the axis of time. If a batch has as
# many samples as time steps, nothing is raised, and sample j counts where sample i has its step j:
# the loss changes when samples change places. Other batches raise, so a training can end at its
# short last batch.
#
# A loss per time step (mean squared error) is masked as expected. For Dice on masked sequences
# multiply y_true and y_pred by the mask in a loss of one's own, and stop the mask in front of it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "tensorflow-cpu==2.21.0" "keras==3.15.1"
KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'PYTHON'
import keras
import numpy as np

random = np.random.default_rng(0)
samples, steps = 4, 4
x = random.uniform(0.1, 1.0, (samples, steps, 3)).astype("float32")
for row, length in enumerate((4, 3, 2, 1)):
    x[row, length:] = 0.0  # padded steps
y = (random.uniform(size=(samples, steps, 2)) > 0.5).astype("float32")


def loss_of(loss, order):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((steps, 3))
    outputs = keras.layers.Dense(2, activation="sigmoid")(keras.layers.Masking()(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(loss=loss)
    return model.test_on_batch(x[order], y[order])


def dice():
    return keras.losses.Dice(axis=(1, 2))


in_order, turned = np.arange(samples), np.arange(samples)[::-1]
print("keras", keras.__version__)
squares = [float(loss_of("mse", order)) for order in (in_order, turned)]
print("mean squared error, samples in two orders:", squares)
dices = [float(loss_of(dice(), order)) for order in (in_order, turned)]
print("Dice, samples in two orders:              ", dices)
try:
    loss_of(dice(), in_order[:3])
    raised = None
except Exception as error:
    raised = type(error).__name__
print("Dice, three samples of four steps:        ", raised)
is_as_told = np.isclose(*squares, rtol=1e-6) and not np.isclose(*dices, rtol=1e-3) and raised
if not is_as_told:
    raise SystemExit("changed")
PYTHON
