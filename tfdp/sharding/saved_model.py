"""What a SavedModel holds of a sharded variable: one whole variable.

TensorFlow traces the functions of a SavedModel once more while it writes the file. What
they read of a sharded variable then is its stand-in: a variable of the whole shape that
never gets a value, and so takes no memory. The file's value is the whole of the shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.names import (
    UninitializedVariable,
    in_save_context,
    variable_accessed,
)

__all__ = ["export_stand_in", "is_tracing_saved_model", "read_shards", "read_stand_in"]


def read_shards(shards: Sequence[tf.Variable]) -> list[tf.Tensor]:
    """The values of shards, without a note in the graph of a function.

    Keras puts every variable that a graph has noted into a SavedModel.
    """
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(shard) for shard in shards]
    values = []
    for shard in shards:
        if shard.trainable:
            variable_accessed(shard)
        read = tf.raw_ops.ReadVariableOp(resource=shard.handle, dtype=shard.dtype)
        values.append(read)
    return values


def is_tracing_saved_model() -> bool:
    """Whether the graph being built is one that a SavedModel will hold."""
    return in_save_context() and not tf.executing_eagerly()


def read_stand_in(variable: Any) -> tf.Tensor:
    """The value of `variable` in a function that is traced for a SavedModel."""
    if variable.saved_model_stand_in is None:
        variable.saved_model_stand_in = _without_value(variable)
    return variable.saved_model_stand_in.read_value()


def export_stand_in(variable: Any, object_map: Any, tensor_map: Any) -> list[Any]:
    """Puts a whole variable for `variable` into the graph of a SavedModel.

    Args:
      variable: the sharded one.
      object_map: from objects to those in the graph of the file.
      tensor_map: from resources to those in the graph of the file.

    Returns:
      The resources by which functions may have captured it.
    """
    exported = _without_value(variable)
    object_map[variable] = exported
    stand_in = variable.saved_model_stand_in
    if stand_in is None:  # no function of this file, nor of one before, reads it
        return []
    tensor_map[stand_in.handle] = exported.handle
    return [stand_in.handle]


def _without_value(variable: Any) -> Any:
    return UninitializedVariable(
        trainable=variable.trainable,
        shape=variable.shape,
        dtype=variable.dtype,
        name=variable.name.split(":")[0],
    )
