"""Isolates the side effects of a layer that is computed twice.

The second pass must see the state that the first one saw, and must not update moving
statistics or counters again. Random draws: see `rematerialization`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private import names
from tfdp._private.keras_layers import stored_value
from tfdp._private.keras_models import (
    layers_within,
    losses_added_in,
    mask_of,
    put_mask,
    state_of,
)


def stored_in(layer: keras.layers.Layer) -> list[tuple[keras.Variable, tf.Tensor]]:
    """The state of the layers within `layer`, with its current values."""
    if tf.distribute.in_cross_replica_context():
        return []
    variables = [v for sublayer in layers_within(layer) for v in state_of(sublayer)]
    return [(v, tf.identity(stored_value(v))) for v in variables]


def without_updates(
    stored: Sequence[tuple[keras.Variable, tf.Tensor]],
) -> contextlib.AbstractContextManager:
    """Makes Keras variables read as `stored`, and never change, within the context."""
    return _WithoutUpdates(state_mapping=stored)


class _WithoutUpdates(keras.StatelessScope):
    """Values stored and read back have no gradient, as in a variable."""

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        super().add_update((variable, tf.stop_gradient(value)))


def copy_in_name(tensor: Any, mask: Any = None) -> Any:
    """A copy of the tensor, or None, with the mask that Keras attached to it."""
    if tensor is None:
        return None
    copied = tf.identity(tensor)
    mask = mask_of(tensor) if mask is None else mask
    if mask is not None:
        put_mask(copied, mask)
    return copied


def as_read(value: Any) -> Any:
    """The tensor of a variable; anything else as it is."""
    is_variable = isinstance(
        value, (keras.Variable, tf.Variable, names.DistributedVariable)
    )
    return tf.convert_to_tensor(value) if is_variable else value


def count_losses(layer: keras.layers.Layer) -> int:
    """The number of losses that `add_loss` left in `layer` and the layers within it."""
    return sum(len(losses_added_in(sublayer)) for sublayer in layers_within(layer))


def own_copies(variables: Sequence[keras.Variable]) -> list[tf.Variable]:
    """This replica's component of each variable: its copy or its shard."""
    stored = [stored_value(variable) for variable in variables]
    if tf.distribute.in_cross_replica_context():
        return []
    return [
        names.own_copy(value, names.current_rank())
        if isinstance(value, names.DistributedVariable)
        and tf.distribute.get_strategy() is value.distribute_strategy
        else value
        for value in stored
    ]


def read_besides(
    watcher: names.VariableWatcher, own: Sequence[tf.Variable]
) -> list[tf.Variable]:
    """Variables that a block reads but does not hold, such as in a `Lambda`."""
    if tf.distribute.in_cross_replica_context():
        return []
    found = [v for v in watcher.watched_variables() if v.trainable]
    # To gather shards, those of all replicas are read.
    copies = {id(copy): copy for copy in map(_copy_here, found)}
    return [copy for place, copy in copies.items() if place not in set(map(id, own))]


def _copy_here(variable: Any) -> tf.Variable:
    """The calling replica's component of a variable, given the variable or a copy."""
    whole = variable
    if not isinstance(variable, names.DistributedVariable):
        whole = names.whole_of(variable)
    return variable if whole is None else names.own_copy(whole, names.current_rank())


def record_gradient(
    outputs: Sequence[tf.Tensor],
    tensors: Sequence[tf.Tensor],
    variables: Sequence[tf.Variable],
    backward: Callable[..., list[Any]],
) -> None:
    """Gives the open gradient tapes the `backward` function of `outputs`.

    Not `tf.custom_gradient`: it reads every variable again, which gathers sharded ones
    and keeps them until the backward pass.
    """
    for variable in variables:
        names.variable_accessed(variable)
    inputs = [*tensors, *(variable.handle for variable in variables)]
    names.record_operation("Rematerialized", outputs, inputs, backward)
