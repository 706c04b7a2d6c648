"""What a layer does besides computing, told apart when it is computed twice.

A second pass through the same layer must see what the first one saw, and must not
update moving statistics or counters again. What is random is in `random_draws`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_layers import stored_value
from tfdp._private.keras_models import (
    layers_within,
    losses_added_in,
    mask_of,
    put_mask,
    state_of,
)
from tfdp._private.names import (
    DistributedVariable,
    VariableWatcher,
    current_rank,
    own_copy,
    record_operation,
    variable_accessed,
    whole_of,
)


def stored_in(layer: keras.layers.Layer) -> list[tuple[keras.Variable, tf.Tensor]]:
    """What the layers within `layer` store, as it is now."""
    if tf.distribute.in_cross_replica_context():
        return []
    variables = [v for sublayer in layers_within(layer) for v in state_of(sublayer)]
    return [(v, tf.identity(stored_value(v))) for v in variables]


def without_updates(
    stored: Sequence[tuple[keras.Variable, tf.Tensor]],
) -> contextlib.AbstractContextManager:
    """While this lasts assignments to Keras variables have no effect.

    Args:
      stored: values that are read of such variables.
    """
    return _Apart(state_mapping=stored)


class _Apart(keras.StatelessScope):
    """In which what is stored and read again has no gradient, as in a variable."""

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        super().add_update((variable, tf.stop_gradient(value)))


def copy_in_name(tensor: Any, mask: Any = None) -> Any:
    """The same tensor under another name, with the mask that Keras left with it.

    Args:
      tensor: or what becomes one, such as a number; None stays None.
      mask: that it had, where it may have lost it since.
    """
    if tensor is None:
        return None
    copied = tf.identity(tensor)
    mask = mask_of(tensor) if mask is None else mask
    if mask is not None:
        put_mask(copied, mask)
    return copied


def as_read(value: Any) -> Any:
    """The tensor of a variable; anything else as it is."""
    is_variable = isinstance(value, (keras.Variable, tf.Variable, DistributedVariable))
    return tf.convert_to_tensor(value) if is_variable else value


def count_losses(layer: keras.layers.Layer) -> int:
    """How many losses `add_loss` has left in `layer` and the layers within it."""
    return sum(len(losses_added_in(sublayer)) for sublayer in layers_within(layer))


def own_copies(variables: Sequence[keras.Variable]) -> list[tf.Variable]:
    """What the calling replica itself holds of each variable: its copy or its shard."""
    stored = [stored_value(variable) for variable in variables]
    if tf.distribute.in_cross_replica_context():
        return []
    return [
        own_copy(value, current_rank())
        if isinstance(value, DistributedVariable)
        and tf.distribute.get_strategy() is value.distribute_strategy
        else value
        for value in stored
    ]


def read_besides(
    watcher: VariableWatcher, own: Sequence[tf.Variable]
) -> list[tf.Variable]:
    """Variables that a block has read, and that its layers do not hold.

    Such as the table of a layer elsewhere, in a `Lambda` or an operation of Keras.

    Args:
      watcher: of the first pass.
      own: the `own_copies` of all that it holds.
    """
    if tf.distribute.in_cross_replica_context():
        return []
    found = [v for v in watcher.watched_variables() if v.trainable]
    # Those of all replicas are read to gather shards.
    copies = {id(copy): copy for copy in map(_copy_here, found)}
    return [copy for place, copy in copies.items() if place not in set(map(id, own))]


def _copy_here(variable: Any) -> tf.Variable:
    """What the calling replica trains of a variable, or of one copy of it."""
    whole = variable
    if not isinstance(variable, DistributedVariable):
        whole = whole_of(variable)
    return variable if whole is None else own_copy(whole, current_rank())


def record_gradient(
    outputs: Sequence[tf.Tensor],
    tensors: Sequence[tf.Tensor],
    variables: Sequence[tf.Variable],
    backward: Callable[..., list[Any]],
) -> None:
    """Tells the open gradient tapes how to get from `outputs` back to what made them.

    Not `tf.custom_gradient`: that reads every variable once more, which gathers those
    that are stored in shards, and keeps them until the backward pass.
    """
    for variable in variables:
        variable_accessed(variable)
    inputs = [*tensors, *(variable.handle for variable in variables)]
    record_operation("Rematerialized", outputs, inputs, backward)
