#!/usr/bin/env bash
# Keras 3.15.1, keras.ops.maximum, minimum and clip: where the two sides are equal the gradient is
# another one on TensorFlow than on JAX, and on TensorFlow it depends on the order of the arguments.
#
# JAX gives each side a half. TensorFlow gives all to the first: maximum(x, 0) has the gradient 1 at
# x = 0, maximum(0, x) has 0. So losses with a margin and activations that are written with maximum
# train otherwise on the two backends when they begin at the edge, as layers that start with zeros
# do (the last one of a residual branch, the second matrix of LoRA). relu and reduce_max agree.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
  "tensorflow-cpu==2.21.0" "keras==3.15.1" "jax==0.10.2" "jaxlib==0.10.2"
cat > "$folder/program.py" <<'PYTHON'
import keras

FUNCTIONS = {
    "maximum(x, 0)": lambda x: keras.ops.maximum(x, 0.0),
    "maximum(0, x)": lambda x: keras.ops.maximum(0.0, x),
    "minimum(x, 0)": lambda x: keras.ops.minimum(x, 0.0),
    "clip(x, 0, 1)": lambda x: keras.ops.clip(x, 0.0, 1.0),
    "relu(x)": keras.ops.relu,
}
EXPECTED = {"tensorflow": [1.0, 0.0, 1.0, 1.0, 0.0], "jax": [0.5, 0.5, 0.5, 0.5, 0.0]}


def gradient(function):
    if keras.backend.backend() == "jax":
        import jax

        return float(jax.grad(function)(0.0))
    import tensorflow as tf

    x = tf.Variable(0.0)
    with tf.GradientTape() as tape:
        y = function(x)
    return float(tape.gradient(y, x))


seen = {name: gradient(function) for name, function in FUNCTIONS.items()}
print("keras", keras.__version__, keras.backend.backend(), "gradients at 0:", seen)
if list(seen.values()) != EXPECTED[keras.backend.backend()]:
    raise SystemExit("changed")
PYTHON
for backend in tensorflow jax; do
  KERAS_BACKEND=$backend JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3 \
    "$folder/venv/bin/python" "$folder/program.py"
done
