#!/usr/bin/env bash
# TensorFlow 2.21.0, tf.distribute: assign(3) to an integer variable of two replicas, and it reads
# 2.
#
# A variable that each replica adds to, and that reads as their sum (synchronization ON_READ,
# aggregation SUM, as metrics and counters of samples or tokens have), is assigned by giving each
# replica value / replicas. For an integer dtype the quotient is cut: 3 / 2 is 1 on each, and 1 + 1
# is 2. So a count that is set back to what it was after a restart loses up to replicas - 1; from 7
# on 8 replicas nothing is left. Floating point is right, and so is a count by assign_add in the
# replicas. A good guess would be the number that was assigned, as one replica could hold all of it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "tensorflow-cpu==2.21.0"
TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'PYTHON'
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 8)


def read_back(replicas, value, dtype):
    strategy = tf.distribute.MirroredStrategy([f"CPU:{device}" for device in range(replicas)])
    with strategy.scope():
        count = tf.Variable(
            tf.zeros([], dtype),
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
            trainable=False,
        )
    count.assign(tf.constant(value, dtype))
    return count.read_value().numpy().item()


print("tensorflow", tf.__version__)
seen = []
for case in ((2, 3, "int64"), (8, 7, "int64"), (8, 1000, "int32"), (2, 3, "float32")):
    seen.append(read_back(*case))
    print("{} replicas, assign({}) of {}, reads".format(*case), seen[-1])
if seen != [2, 0, 1000, 3.0]:
    raise SystemExit("changed")
PYTHON
