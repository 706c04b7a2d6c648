#!/usr/bin/env bash
# NumPy 2.4.6 with ml_dtypes 0.6.0: np.nan_to_num of a bfloat16 or float8 array changes nothing,
# np.nansum and np.nanmean are NaN, np.nanargmax points at the NaN, np.sort leaves the array
# unsorted.
#
# NumPy asks whether the dtype is a subclass of np.inexact. Those of ml_dtypes, which TensorFlow,
# JAX and Keras give out, are not, so these functions take them for types that have no NaN, and
# return their input. Sorting compares with <, which is false for NaN, and so stops at it; float16
# puts NaN last. Nothing is raised. np.isnan, np.isfinite, np.max, np.nanmax and np.median are
# right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "numpy==2.4.6" "ml-dtypes==0.6.0"
"$folder/venv/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy as np

print("numpy", np.__version__, "ml_dtypes", ml_dtypes.__version__)
dtypes = np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
for dtype in dtypes:
    values = np.array([3.0, np.nan, 1.0, 2.0], dtype)
    cleaned, order = np.nan_to_num(values).tolist(), np.sort(values).tolist()
    total, place = float(np.nansum(values)), int(np.nanargmax(values))
    print(f"{np.dtype(dtype).name:14} nan_to_num {cleaned} nansum {total}", end=" ")
    print(f"nanargmax {place} sort {order}")
    told = bool(np.isnan(cleaned).any()), bool(np.isnan(total)), place == 1, order[:3] != [1, 2, 3]
    if told != (dtype is not np.float16,) * 4:
        raise SystemExit("changed")
PYTHON
