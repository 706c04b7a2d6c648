#!/usr/bin/env bash
# Keras 3.15.1 on TensorFlow: fit calls on_epoch_end of a PyDataset before the first epoch, and
# throws away the batches that it has read by then.
#
# To build the model and its metrics fit draws a batch, and then resets the data set, for which it
# calls on_epoch_end. A data set that grows harder, or that takes the next file or the next seed at
# the end of an epoch, begins with its second stage; the first is never trained on, and its batches
# were read for nothing. on_epoch_begin is not called for it. A good guess would be as many ends as
# epochs, each after its epoch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "tensorflow-cpu==2.21.0" "keras==3.15.1"
KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'PYTHON'
import keras
import numpy as np


class Stages(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.stage, self.calls = 0, []

    def __len__(self):
        return 2

    def __getitem__(self, batch):
        self.calls.append(f"stage {self.stage} batch {batch}")
        return np.ones((2, 2), "float32"), np.ones((2, 1), "float32")

    def on_epoch_begin(self):
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")
        self.stage += 1


model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
data = Stages()
model.fit(data, epochs=2, shuffle=False, verbose=0)
print("keras", keras.__version__)
print("calls of two epochs:", *data.calls, sep="\n  ")
trained = data.calls[data.calls.index("begin") :]
if data.calls.count("end") != 3 or "stage 0 batch 0" in trained:
    raise SystemExit("changed")
PYTHON
