#!/usr/bin/env bash
# Keras 3.15.1: after keras.config.set_floatx("bfloat16") integer labels are rounded to bfloat16,
# and metrics stop to count at 256.
#
# A loss turns its labels to its dtype, that is floatx, before it compares them: class 257 becomes
# 256, so that sparse cross-entropy trains another class, and words of a vocabulary of 50,000 are
# rounded to one in 256. Nothing is raised. A metric counts in floatx too: 256 + 1 is 256, so that
# 500 wrong and then 500 right rows have the accuracy 1.0. float16 does it above 2,048. The dtype
# policies "bfloat16" and "mixed_bfloat16" leave floatx alone; losses and metrics are right there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "tensorflow-cpu==2.21.0" "keras==3.15.1"
KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'PYTHON'
import keras
import numpy as np

classes, label = 3000, np.array([257])
logits = np.zeros((1, classes), "float32")
logits[0, label] = 20.0


def loss():
    return float(keras.losses.SparseCategoricalCrossentropy(from_logits=True)(label, logits))


def accuracy():
    metric = keras.metrics.BinaryAccuracy()
    for row in range(1000):
        metric.update_state([[1.0]], [[float(row >= 500)]])
    return float(metric.result())


print("keras", keras.__version__)
keras.config.set_dtype_policy("bfloat16")
right = loss(), accuracy()
print("policy bfloat16: loss of a right prediction of class 257, accuracy of 500 of 1,000:", *right)
keras.config.set_dtype_policy("float32")
keras.config.set_floatx("bfloat16")
seen = loss(), accuracy()
print("floatx bfloat16:                                                                   ", *seen)
if right[0] > 1e-3 or right[1] != 0.5 or seen != (20.0, 1.0):
    raise SystemExit("changed")
PYTHON
