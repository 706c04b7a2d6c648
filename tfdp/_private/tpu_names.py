"""Private TensorFlow names of the TPU strategy. Importing them needs no TPU."""

# ruff: noqa: F401 (imported for other modules)
from __future__ import annotations

from typing import Any

import tensorflow as tf

# Reduce-scatter; `tf.raw_ops` does not have it.
from tensorflow.compiler.tf2xla.ops.gen_xla_ops import xla_reduce_scatter
from tensorflow.python.distribute.tpu_strategy import TPUExtended

# Detects the graph of TPU replicas; assigns and returns the new value.
from tensorflow.python.distribute.tpu_util import (
    enclosing_tpu_context,
    make_raw_assign_fn,
)
from tensorflow.python.distribute.tpu_values import (
    TPUMirroredVariable,
    TPUVariableMixin,
)


def in_tpu_replica() -> bool:
    """Whether the current graph is that of TPU replicas."""
    return enclosing_tpu_context() is not None


def pack_variables(strategy: tf.distribute.Strategy) -> None:
    """One handle for all copies of a variable, as in stock TPUStrategy."""
    strategy._enable_packed_variable_in_eager_mode = True


def read_stored(variable: TPUVariableMixin) -> tf.Tensor:
    """The value stored for the calling replica, whatever the variable returns."""
    return TPUVariableMixin._read_variable_op(variable)


def _assign(handle: tf.Tensor, value: tf.Tensor, name: Any = None) -> tf.Operation:
    return tf.raw_ops.AssignVariableOp(resource=handle, value=value, name=name)


#: `assign_in_replica(variable, value, use_locking, name, read_value)`
assign_in_replica = make_raw_assign_fn(_assign)
