#!/usr/bin/env bash
# TensorFlow 2.21.0, MirroredStrategy: asking a variable whether it has an attribute adds a sum over
# the replicas to the graph.
#
# A distributed variable that lacks an attribute looks it up in its value. The value of a variable
# with synchronization ON_READ, as of metrics, is the sum over all replicas. So
# getattr(variable, "no_such_name", None), which code that walks over objects does by the hundred,
# reads all replicas' copies; on several workers it is a collective, in which all must take part.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "tensorflow-cpu==2.21.0"
TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'PYTHON'
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    total = tf.Variable(
        0.0,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
        trainable=False,
    )


def kinds_of_operations(look):
    @tf.function(autograph=False)
    def function():
        with strategy.scope():
            look()
        return tf.constant(0)

    return sorted(op.type for op in function.get_concrete_function().graph.get_operations())


without = kinds_of_operations(lambda: None)
asked = kinds_of_operations(lambda: getattr(total, "no_such_name", None))
print("tensorflow", tf.__version__)
print("without a look:", without)
print("after getattr:", asked)
if "ReadVariableOp" in without or asked.count("ReadVariableOp") < 2:
    raise SystemExit("changed")
PYTHON
