#!/usr/bin/env bash
# TensorFlow 2.21.0, Keras 3.15.1: after keras.utils.set_random_seed (or tf.random.set_seed) random
# numbers drawn in Dataset.map are the same in every epoch of fit.
#
# fit makes a new iterator for each epoch, a new iterator makes new kernels of the random
# operations, and these begin at the seed. So an image that is flipped is flipped in all epochs:
# there are as many augmented images as images. shuffle() of the same data set does draw another
# order each epoch, and without a global seed the map does too. With repeat() in the data set and
# steps_per_epoch there is one iterator, and epochs differ.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "tensorflow-cpu==2.21.0" "keras==3.15.1"
KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'PYTHON'
import keras
import tensorflow as tf


def drawn(seed, repeated=False):
    if seed is not None:
        keras.utils.set_random_seed(seed)
    rows = []

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            rows.append(round(float(data[0][0, 0]), 4))
            return super().train_step(data)

    data = tf.data.Dataset.range(2).map(lambda _: (tf.random.uniform([1, 1]), tf.zeros([1, 1])))
    model = Model()
    model.compile("sgd", "mse", run_eagerly=True)
    if repeated:
        model.fit(data.repeat(), epochs=3, steps_per_epoch=2, verbose=0)
    else:
        model.fit(data, epochs=3, verbose=0)
    return [tuple(rows[start : start + 2]) for start in (0, 2, 4)]


print("tensorflow", tf.__version__, "keras", keras.__version__)
free, seeded, repeated = drawn(None), drawn(1), drawn(1, repeated=True)
print("three epochs without a seed:", *free)
print("with a seed:                ", *seeded)
print("with a seed and repeat():   ", *repeated)
if len(set(free)) != 3 or len(set(seeded)) != 1 or len(set(repeated)) != 3:
    raise SystemExit("changed")
PYTHON
