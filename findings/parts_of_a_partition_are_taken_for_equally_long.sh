#!/usr/bin/env bash
# TensorFlow 2.21.0, graph optimizer: in a tf.function the outputs of tf.dynamic_partition are taken
# for equally long, so gradients of broadcasts between them are wrong, and valid sums fail.
#
# Its shape function gives one unknown length to all outputs, and the optimizer takes the same
# unknown for the same number. a has four rows and b one: the gradient of sum(a * b) for b is
# sum(a) = [10], and is [1, 2, 3, 4] here, because no axis is left to sum over. Sizes of a and b are
# divided to 1. a + b + ..., which broadcasts b, becomes AddN and raises InvalidArgumentError. All
# are right in eager mode, and with
# tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True}).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "tensorflow-cpu==2.21.0"
TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'PYTHON'
import tensorflow as tf

x, which = tf.range(1.0, 6.0), tf.constant([0, 0, 0, 0, 1])


def gradient(x, which):
    a, b = tf.dynamic_partition(x, which, 2)
    with tf.GradientTape() as tape:
        tape.watch(b)
        y = tf.reduce_sum(a * b)
    return tape.gradient(y, b)


def quotient(x, which):
    a, b = tf.dynamic_partition(x, which, 2)
    return tf.raw_ops.Div(x=tf.size(a), y=tf.size(b))


def total(x, which):
    a, b = tf.dynamic_partition(x, which, 2)
    return a + b + tf.exp(a) + tf.exp(b)


def seen():
    found = []
    for function in (gradient, quotient, total):
        try:
            found.append(tf.function(function, autograph=False)(x, which).numpy().tolist())
        except tf.errors.InvalidArgumentError as error:
            found.append(str(error).splitlines()[4][:80])
    return found


right = [function(x, which).numpy().tolist() for function in (gradient, quotient, total)]
optimized = seen()
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
plain = seen()
print("tensorflow", tf.__version__)
for name, numbers in (("eager:", right), ("graph:", optimized), ("not optimized:", plain)):
    print(f"{name:14}", *numbers)
if right[:2] != [[10.0], 4] or plain[:2] != right[:2] or not isinstance(plain[2], list):
    raise SystemExit("changed")
if optimized[:2] != [[1.0, 2.0, 3.0, 4.0], 1] or isinstance(optimized[2], list):
    raise SystemExit("changed")
PYTHON
