"""`KeptCopy`: weights and the optimizer's state as they were, on their devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp.sharding.variables import ShardedVariable
from tfdp.step.compression import STATE
from tfdp.step.held_optimizers import innermost_optimizers, optimizers_of

__all__ = ["KeptCopy"]


class KeptCopy:
    """Keeps what training has made of a model, and gives it back.

    Random states are left as they are: the same draws would come once more. So are
    learning rates: a schedule knows its step, and a number is what callbacks have set.

    Args:
      model: made under a strategy of tfdp.

    Cost: the bytes of all that on each device, from the next update on.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._kept: list[tuple[tf.Variable, tf.Tensor]] = []
        #: How often the copy was given back since it was taken.
        self.times_used = 0

    def can_be_taken(self) -> bool:
        """Whether all that training makes is there; a model may build itself late."""
        return self._model.built and all(o.built for o in optimizers_of(self._model))

    @property
    def is_taken(self) -> bool:
        """Whether there is something to go back to."""
        return bool(self._kept)

    def take(self) -> None:
        """Keeps what everything is now, in the place of what was kept before."""
        # Read values are kept as they are: an update then writes elsewhere.
        self._kept = [(copy, copy.read_value()) for copy in _copies(self._model)]
        self.times_used = 0

    def put_back(self) -> None:
        """Makes everything what it was; nothing, before the first copy."""
        for copy, value in self._kept:
            copy.assign(value)
        known = {id(copy) for copy, _ in self._kept}
        for copy in _left_by_sums(self._model) if self._kept else ():
            if id(copy) not in known:  # made since then, with zeros
                copy.assign(tf.zeros_like(copy))
        self.times_used += 1


def _copies(model: keras.Model) -> Iterator[tf.Variable]:
    """Every copy and every shard that a device of this process holds."""
    optimizers = optimizers_of(model)
    leaves = [leaf for owner in optimizers for leaf in innermost_optimizers(owner)]
    rates = [leaf.learning_rate for leaf in leaves]
    seen = {id(rate.value) for rate in rates if isinstance(rate, keras.Variable)}
    states = [optimizer.variables for optimizer in optimizers]
    # Not the model's variables: metrics and random states go on.
    for variable in itertools.chain(model.weights, *states):
        value: Any = variable.value
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, ShardedVariable):
            yield from (value.shard(rank) for rank in _ranks(model))
        else:
            yield from getattr(value, "values", (value,))
    yield from _left_by_sums(model)


def _left_by_sums(model: keras.Model) -> Iterator[tf.Variable]:
    """What compressed sums keep from step to step: made by the first of them."""
    for optimizer in optimizers_of(model):
        state = getattr(optimizer, STATE, None)
        if state is not None:
            yield from state.copies


def _ranks(model: keras.Model) -> range:
    return range(len(model.distribute_strategy.extended.worker_devices))
