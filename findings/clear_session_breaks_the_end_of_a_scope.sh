#!/usr/bin/env bash
# Keras 3.15.1 on TensorFlow 2.21.0: clear_session within the scope of any tf.distribute strategy
# breaks the end of the scope, and keras-tuner 1.4.8 calls it before each of its trials.
#
# clear_session resets TensorFlow's default graph, and with it the record of the scopes that are
# open. What comes after it in the block trains without the strategy, since get_strategy() returns
# the default one, and without a word. Only the end of the block fails, with IndexError, "pop from
# empty list", far from the cause. A search of keras-tuner that is written within the scope, as
# compile and fit are, ends so after its last trial. A good guess would be that clear_session
# forgets Keras' models and names, and no scope.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "tensorflow-cpu==2.21.0" "keras==3.15.1" "keras-tuner==1.4.8" "tensorboard==2.21.0"
cd "$folder"
KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'PYTHON'
import keras
import keras_tuner
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy(["CPU:0"])
found = {}
try:
    with strategy.scope():
        before = tf.distribute.get_strategy() is strategy
        keras.backend.clear_session()
        found["in scope"] = before, tf.distribute.get_strategy() is strategy
except IndexError as error:
    found["end of the scope"] = f"IndexError: {error}"


def build(hyperparameters):
    units = hyperparameters.Int("units", 1, 2)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units)])
    model.compile("sgd", "mse")
    return model


try:
    with strategy.scope():
        tuner = keras_tuner.RandomSearch(build, "loss", max_trials=1, overwrite=True)
        tuner.search(np.ones((4, 2)), np.ones((4, 1)), epochs=1, verbose=0)
        found["trials"] = len(tuner.oracle.get_best_trials())
except IndexError as error:
    found["end of a search"] = f"IndexError: {error}"
print("keras", keras.__version__, "tensorflow", tf.__version__)
for name, value in found.items():
    print(f"{name}: {value}")
ends = "IndexError: pop from empty list"
expected = {
    "in scope": (True, False),
    "end of the scope": ends,
    "trials": 1,
    "end of a search": ends,
}
if found != expected:
    raise SystemExit("changed")
PYTHON
