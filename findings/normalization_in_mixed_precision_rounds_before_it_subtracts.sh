#!/usr/bin/env bash
# Keras 3.15.1: a Normalization layer rounds its input to the dtype of the policy before it
# subtracts the mean, so that the numbers it is there for are lost: years in mixed_bfloat16 are 0,
# large numbers in mixed_float16 are NaN.
#
# adapt() has found the right mean and variance in float32. In mixed_bfloat16 the years 2020, 2021,
# 2022 and 2026 become 2016, 2024, 2024 and 2024 and the mean 2024; above 65,504, as of incomes or
# of seconds, float16 is infinite, and inf - inf is NaN. A good guess would be the normalized
# numbers, rounded afterwards, as LayerNormalization and BatchNormalization do. dtype="float32" for
# this layer is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "tensorflow-cpu==2.21.0" "keras==3.15.1"
KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'PYTHON'
import keras
import numpy as np

years = np.array([[2020.0], [2021.0], [2022.0], [2026.0]], "float32")
incomes = np.array([[100_000.0], [120_000.0], [90_000.0], [70_000.0]], "float32")


def normalized(values, dtype):
    layer = keras.layers.Normalization(dtype=dtype)
    layer.adapt(values)
    return keras.ops.convert_to_numpy(layer(values)).astype("float32").ravel()


print("keras", keras.__version__)
seen = {}
for dtype in ("float32", "mixed_bfloat16", "mixed_float16"):
    seen[dtype] = normalized(years, dtype), normalized(incomes, dtype)
    print(f"{dtype:15} years {seen[dtype][0]}  incomes {seen[dtype][1]}")
right = (years - years.mean()) / years.std()
if not np.allclose(seen["float32"][0], right.ravel(), atol=1e-3):
    raise SystemExit("changed")
if np.unique(seen["mixed_bfloat16"][0]).size != 2 or not np.isnan(seen["mixed_float16"][1]).all():
    raise SystemExit("changed")
PYTHON
