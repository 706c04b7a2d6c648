#!/usr/bin/env bash
# Keras 3.15.1: on weights of dtype bfloat16, Adam, AdamW and Lamb never change a weight, and Nadam
# makes NaN. Nothing is raised or warned of; the loss stays where it was.
#
# The correction of the second moment is 1 - beta_2 ** step, computed in the dtype of the weight.
# beta_2 is 0.999, the nearest bfloat16 is 1.0, so the correction is 0 in every step, and with its
# root so is the step's length. With beta_2=0.99 they train. Under the policy "mixed_bfloat16",
# which keeps the weights in float32, all is right, and so it is in float16. A good guess would be a
# training that is right to two or three digits, as that with SGD or RMSprop is.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "tensorflow-cpu==2.21.0" "keras==3.15.1"
KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'PYTHON'
import keras
import numpy as np

x, y = np.ones((8, 4), "float32"), np.zeros((8, 1), "float32")


def weight_after(optimizer, dtype):
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", dtype=dtype)
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile(optimizer, "mse")
    model.fit(x, y, epochs=10, verbose=0)
    return float(np.asarray(model.get_weights()[0], "float32")[0, 0])


print("keras", keras.__version__)
names = "Adam", "AdamW", "Lamb", "Nadam", "RMSprop"
seen = {}
for dtype in ("float32", "mixed_bfloat16", "float16", "bfloat16"):
    for name in names:
        seen[dtype, name] = weight_after(getattr(keras.optimizers, name)(0.1), dtype)
    print(f"{dtype:15} a weight of 1 after ten steps:", {n: seen[dtype, n] for n in names})
other_beta = weight_after(keras.optimizers.Adam(0.1, beta_2=0.99), "bfloat16")
print("bfloat16        Adam with beta_2=0.99:        ", other_beta)
stuck = [seen["bfloat16", name] == 1.0 for name in names[:3]]
others = [seen[dtype, name] < 0.9 for dtype, name in seen if dtype != "bfloat16"]
if not all(stuck) or not np.isnan(seen["bfloat16", "Nadam"]) or not all(others):
    raise SystemExit("changed")
if seen["bfloat16", "RMSprop"] > 0.9 or other_beta > 0.9:
    raise SystemExit("changed")
PYTHON
