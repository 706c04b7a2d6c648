#!/usr/bin/env bash
# Keras 3.15.1 with MirroredStrategy: after quantize("float8") each replica trains with scales of
# its own, and the copies of one variable differ.
#
# A layer of float8 keeps the largest numbers that it has met, and makes its scale of them. Keras
# stores them by way of a gradient that overwrites the variable, and does so on each replica before
# gradients are summed. So a replica that meets a 9 has the history 9, and another one 1: they round
# one batch in two ways, a file has the first replica's, and a training that goes on from it rounds
# otherwise. A good guess would be the largest number of all replicas, as on one device.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "tensorflow-cpu==2.21.0" "keras==3.15.1"
KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'PYTHON'
import keras
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
x, y = np.ones((8, 4), "float32"), np.zeros((8, 2), "float32")
x[6] = 9.0


def largest_inputs(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.quantize("float8")
        model.compile("sgd", "mse", jit_compile=False)
    model.fit(x, y, batch_size=8, verbose=0)
    history = model.layers[0].inputs_amax_history.value
    return [float(copy.numpy().max()) for copy in getattr(history, "values", [history])]


print("keras", keras.__version__, "tensorflow", tf.__version__)
one = largest_inputs(tf.distribute.get_strategy())
two = largest_inputs(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
print("largest input, on one device:      ", one)
print("in the copies of two replicas:     ", two)
if one != [9.0] or sorted(two) != [1.0, 9.0]:
    raise SystemExit("changed")
PYTHON
