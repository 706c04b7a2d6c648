"""The private TensorFlow names of the TPU strategy, and what for.

None of them needs a TPU to be imported.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# The sum of which each replica gets its part; `tf.raw_ops` does not have it.
from tensorflow.compiler.tf2xla.ops.gen_xla_ops import xla_reduce_scatter

# A whole step for all TPU cores: our base class.
from tensorflow.python.distribute.tpu_strategy import TPUExtended

# Whether code runs in the graph of the TPU replicas; assignment with its read after it.
from tensorflow.python.distribute.tpu_util import (
    enclosing_tpu_context,
    make_raw_assign_fn,
)

# Variables with one component per TPU core.
from tensorflow.python.distribute.tpu_values import (
    TPUMirroredVariable,
    TPUVariableMixin,
)

__all__ = [
    "TPUExtended",
    "TPUMirroredVariable",
    "TPUVariableMixin",
    "assign_in_replica",
    "in_tpu_replica",
    "pack_variables",
    "read_stored",
    "xla_reduce_scatter",
]


def in_tpu_replica() -> bool:
    """Whether the graph being built is that of TPU replicas."""
    return enclosing_tpu_context() is not None


def pack_variables(strategy: tf.distribute.Strategy) -> None:
    """One handle for all copies of a variable, as in stock TPUStrategy."""
    strategy._enable_packed_variable_in_eager_mode = True


def read_stored(variable: TPUVariableMixin) -> tf.Tensor:
    """What is stored for the calling replica, whatever the variable's class shows."""
    return TPUVariableMixin._read_variable_op(variable)


def _assign(handle: tf.Tensor, value: tf.Tensor, name: Any = None) -> tf.Operation:
    return tf.raw_ops.AssignVariableOp(resource=handle, value=value, name=name)


#: `assign_in_replica(variable, value, use_locking, name, read_value)`
assign_in_replica = make_raw_assign_fn(_assign)
