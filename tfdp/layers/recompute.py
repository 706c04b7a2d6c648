"""What a layer does besides computing, told apart when it is computed twice.

A second pass through the same layer must draw the same random numbers, and must not
update moving statistics or counters again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.instance_attributes import instance_attributes
from tfdp._private.keras_autocast import stored_value
from tfdp._private.keras_models import (
    layers_within,
    losses_added_in,
    mask_of,
    put_mask,
    seed_generators_of,
    state_of,
)
from tfdp._private.names import (
    DistributedVariable,
    current_rank,
    own_copy,
    record_operation,
    stop_recording,
    variable_accessed,
)
from tfdp.errors import ConfigurationError
from tfdp.variables.global_seed import drawing_globally

__all__ = [
    "RandomDraws",
    "copy_in_name",
    "count_losses",
    "own_copies",
    "record_gradient",
    "refuse_assigned_weights",
    "refuse_other_draws",
    "stop_recording",
    "stored_in",
    "without_updates",
]


# Operations that draw anew each time they run.
DRAWS = frozenset(
    "Multinomial ParameterizedTruncatedNormal RandomGamma RandomPoissonV2 "
    "RandomShuffle RandomStandardNormal RandomUniform RandomUniformInt "
    "TruncatedNormal".split()
)


class RandomDraws:
    """The seeds that the random layers within `layer` drew in one pass."""

    def __init__(self, layer: keras.layers.Layer):
        self._generators = [
            generator
            for sublayer in layers_within(layer)
            for generator in seed_generators_of(sublayer)
        ]
        self._drawn: list[Any] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While this lasts every draw is noted."""
        self._drawn = []

        def next_of(generator: Any) -> Any:
            def draw(ordered: bool = True) -> Any:
                seed = type(generator).next(generator, ordered)
                self._drawn.append(seed)
                return seed

            return draw

        with self._drawing(next_of):
            yield

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """While this lasts every draw gives what it gave before, in the same order."""
        left = iter(self._drawn)

        def next_of(generator: Any) -> Any:
            return lambda ordered=True: next(left)

        with self._drawing(next_of):
            yield

    @contextlib.contextmanager
    def _drawing(self, next_of: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for generator in self._generators:
                stack.enter_context(
                    instance_attributes(generator, {"next": next_of(generator)})
                )
            stack.enter_context(drawing_globally(next_of))
            yield


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
    return keras.StatelessScope(state_mapping=stored)


def refuse_assigned_weights(layer: keras.layers.Layer, scope: Any) -> None:
    """Refuses a layer that assigns to a weight that is trained.

    Args:
      layer: that was computed once more.
      scope: of `without_updates`, in which it was.

    Raises:
      ConfigurationError: when it has assigned to one in this pass.
    """
    for variable in layer.trainable_variables:
        if id(variable) in scope.state_mapping:
            raise ConfigurationError(
                f"The layer {layer.name!r} assigns to {variable.path!r} while it "
                "computes (keras.layers.SpectralNormalization does), and when it is "
                "computed again that weight is another one. Leave it out: "
                "tfdp.remat(model, policy=lambda layer: layer is not ...)."
            )


def copy_in_name(tensor: tf.Tensor) -> tf.Tensor:
    """The same tensor under another name, with the mask that Keras left with it."""
    copied = tf.identity(tensor)
    mask = mask_of(tensor)
    if mask is not None:
        put_mask(copied, mask)
    return copied


def refuse_other_draws(
    layer: keras.layers.Layer,
    outputs: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
) -> None:
    """Refuses what draws numbers of which nobody can have the same again.

    Args:
      layer: for the message.
      outputs: of a pass, in a graph; eager tensors do not say what made them.
      inputs: of the pass: what made these is not looked at.

    Raises:
      ConfigurationError: with what to do.
    """
    if tf.executing_eagerly():
        return
    # Constants that a program has made before are eager, in graphs as well.
    seen = {id(tensor.op) for tensor in inputs if _is_of_graph(tensor)}
    pending = [tensor.op for tensor in outputs if _is_of_graph(tensor)]
    while pending:
        operation = pending.pop()
        if id(operation) in seen:
            continue
        seen.add(id(operation))
        if operation.type in DRAWS:
            raise ConfigurationError(
                f"The layer {layer.name!r} draws random numbers by TensorFlow "
                f"({operation.type}), and would draw others when it is computed again. "
                "Draw by keras.random, or leave it out: "
                "tfdp.remat(model, policy=lambda layer: layer is not ...)."
            )
        pending += [tensor.op for tensor in operation.inputs]


def count_losses(layer: keras.layers.Layer) -> int:
    """How many losses `add_loss` has left in `layer` and the layers within it."""
    return sum(len(losses_added_in(sublayer)) for sublayer in layers_within(layer))


def _is_of_graph(tensor: tf.Tensor) -> bool:
    return not isinstance(tensor, tf.__internal__.EagerTensor)


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
