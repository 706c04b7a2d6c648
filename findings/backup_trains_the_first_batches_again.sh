#!/usr/bin/env bash
# Keras 3.15.1: BackupAndRestore(save_freq=5) restores the weights of batch 5 and begins the epoch
# with batch 1 again.
#
# A training of 10 batches that ends in batch 7 has 15 updates after the second start, the first
# five batches twice. Learning-rate schedules and the bias correction of Adam are five steps ahead
# from then on. A good guess would be that it goes on with batch 6; the option is there for epochs
# that are too long to be lost.
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

x, y = np.ones((20, 2), "float32"), np.ones((20, 1), "float32")


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 6:
            raise KeyboardInterrupt


class Batches(keras.callbacks.Callback):
    seen = ()

    def on_train_batch_begin(self, batch, logs=None):
        self.seen += (batch,)


def fit(folder, *callbacks):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    backup = keras.callbacks.BackupAndRestore(folder, save_freq=5)
    try:
        model.fit(x, y, batch_size=2, verbose=0, callbacks=[backup, *callbacks])
    except KeyboardInterrupt:
        pass
    return int(model.optimizer.iterations)


print("keras", keras.__version__)
with tempfile.TemporaryDirectory() as folder:
    print("updates when it was stopped:          ", fit(os.path.join(folder, "backup"), Stop()))
    batches = Batches()
    updates = fit(os.path.join(folder, "backup"), batches)
print("batches of the second start:          ", *batches.seen)
print("updates in the end, of an epoch of 10:", updates)
if updates != 15 or batches.seen != tuple(range(10)):
    raise SystemExit("changed")
PYTHON
