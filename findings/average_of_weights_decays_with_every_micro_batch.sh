#!/usr/bin/env bash
# Keras 3.15.1: with gradient_accumulation_steps=4 the average of the weights (use_ema=True) decays
# four times per update.
#
# The average is renewed in each call of the optimizer, whether it updates the weights or only adds
# a gradient. So ema_momentum=0.9 acts as 0.9 ** 4 = 0.66, and an average over 1,000 updates becomes
# one over 250. Everything else, such as the schedule of the learning rate, counts updates. A good
# guess would be the same averages as without accumulation, if each gradient is the mean of its
# four.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "tensorflow-cpu==2.21.0" "keras==3.15.1"
KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'PYTHON'
import keras
import numpy as np


def average(accumulated, momentum):
    optimizer = keras.optimizers.SGD(
        1.0, use_ema=True, ema_momentum=momentum, gradient_accumulation_steps=accumulated
    )
    variable = keras.Variable(0.0)
    optimizer.build([variable])
    for _ in range(5 * (accumulated or 1)):
        optimizer.apply([keras.ops.ones(())], [variable])
    before = float(variable)
    optimizer.finalize_variable_values([variable])
    return before, float(variable)


print("keras", keras.__version__)
plain = average(None, 0.9)
print("weight after five updates, and its average:       ", *plain)
accumulated = average(4, 0.9)
print("the same of four gradients each:                  ", *accumulated)
repaired = average(4, 0.9**0.25)
print("and with the fourth root of ema_momentum:         ", *repaired)
if plain[0] != accumulated[0] or np.isclose(plain[1], accumulated[1], rtol=0.05):
    raise SystemExit("changed")
PYTHON
