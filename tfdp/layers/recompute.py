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
    seed_generators_of,
)
from tfdp._private.names import (
    DistributedVariable,
    current_rank,
    own_copy,
    record_operation,
    stop_recording,
    variable_accessed,
)

__all__ = [
    "RandomDraws",
    "count_losses",
    "own_copies",
    "record_gradient",
    "stop_recording",
    "without_updates",
]


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
            yield


def without_updates() -> contextlib.AbstractContextManager:
    """While this lasts assignments to Keras variables have no effect."""
    return keras.StatelessScope()


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
