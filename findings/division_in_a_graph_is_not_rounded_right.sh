#!/usr/bin/env bash
# TensorFlow 2.21.0, graph optimizer: in a tf.function a division by a constant is a multiplication
# by its reciprocal, and two of them are joined to one, without jit_compile.
#
# IEEE 754 rounds a quotient right, and so do NumPy and eager TensorFlow. In a graph x / 3 is
# x * (1 / 3): more than a fifth of the float32 numbers differ in the last bit. x / 3 * 0.7 becomes
# x * 0.2333 if nothing else uses the quotient, and other bits if the function also returns it. So
# replicas of a training that must compute equal numbers have to build the same operations around
# them, results that they do not need included. The optimizer is off with
# tf.config.optimizer.set_experimental_options({"constant_folding": False}).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "tensorflow-cpu==2.21.0"
TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import tensorflow as tf

numbers = np.random.default_rng(0).normal(size=100_000).astype("float32")
x = tf.constant(numbers)


def scaled(x):
    quotient = x / 3.0
    return quotient * 0.7, quotient


def part(one, other):
    return float(np.mean(np.asarray(one) != np.asarray(other)))


right = numbers / np.float32(3)
quotient = tf.function(lambda x: x / 3.0, autograph=False)(x)
alone = tf.function(lambda x: scaled(x)[0], autograph=False)(x)
beside = tf.function(scaled, autograph=False)(x)[0]
tf.config.optimizer.set_experimental_options({"constant_folding": False})
plain = tf.function(lambda x: x / 3.0, autograph=False)(x)
print("tensorflow", tf.__version__)
print("eager x / 3, other than NumPy's:     ", part(x / 3.0, right))
print("x / 3 in a graph:                    ", part(quotient, right))
print("the same without constant folding:   ", part(plain, right))
print("x / 3 * 0.7, with and without x / 3: ", part(alone, beside))
seen = part(x / 3.0, right), part(quotient, right), part(plain, right), part(alone, beside)
if seen[0] or seen[1] < 0.2 or seen[2] or not seen[3]:
    raise SystemExit("changed")
PYTHON
