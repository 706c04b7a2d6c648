"""Updates of weights of one shape, traced twice and not once for each of them.

Half of a step's ops are Adam's, some 40 for each weight. Those of two kernels of one
shape differ in their variables only. That they do is seen: the first two of a shape are
traced, and their graphs compared. The step that is trained is traced as ever.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.names import current_rank
from tfdp._private.optimizer_hooks import variable_index, variables_built_with
from tfdp._private.shared_graphs import (
    TracedAlone,
    have_one_content,
    trace_alone,
)
from tfdp._private.traced_alone import ExchangeInside

__all__ = ["trace_updates_once"]

# Whose update looks at nothing of a weight but its shape: not at its name, as Muon's.
BY_SHAPE = (
    keras.optimizers.SGD,
    keras.optimizers.RMSprop,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Nadam,
    keras.optimizers.Lion,
    keras.optimizers.Lamb,
)


@dataclasses.dataclass
class _Shape:
    """The updates of weights of one shape on one replica.

    Args:
      place: of the first weight, among those of the optimizer.
      first: its update.
      is_alike: whether that of the second was the same; None: there was no second.
    """

    place: int
    first: TracedAlone
    is_alike: bool | None = None


def trace_updates_once(optimizer: keras.optimizers.Optimizer) -> None:
    """Lets one graph stand for the updates of all weights of a shape, where it can.

    Args:
      optimizer: of a model that is traced and not trained.
    """
    if type(optimizer) in BY_SHAPE:
        optimizer.update_step = _Updates(optimizer)


class _Updates:
    """In the place of an optimizer's `update_step`."""

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        self._optimizer = optimizer
        self._original = type(optimizer).update_step.__get__(optimizer)
        self._shapes: dict[Any, _Shape] = {}

    def __call__(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if not _is_plain(gradient, variable):
            self._original(gradient, variable, learning_rate)
            return
        graph = tf.compat.v1.get_default_graph()
        key = (
            id(graph),
            current_rank(),
            tuple(variable.shape),
            variable.dtype.name,
            gradient.dtype.name,
            variable.device,
        )
        place = variable_index(self._optimizer, variable)
        # A schedule's number is of this graph; another one is captured.
        is_computed = isinstance(learning_rate, tf.Tensor)
        given = [gradient, learning_rate] if is_computed else [gradient]
        known = self._shapes.get(key)
        if known is not None and known.is_alike and known.first.takes(given):
            self._other(known, place).call(given, is_run=False)
            return
        try:
            traced = trace_alone(
                lambda inner: self._original(
                    inner[0], variable, inner[1] if is_computed else learning_rate
                ),
                given,
                variable.device,
            )
        except ExchangeInside:
            self._original(gradient, variable, learning_rate)
            return
        if known is None:
            self._shapes[key] = _Shape(place, traced)
        elif known.is_alike is None:
            known.is_alike = _are_alike(self._other(known, place), traced)
        traced.call(given, is_run=False)

    def _other(self, known: _Shape, place: int) -> TracedAlone:
        """The first update with what it captured of its weight put for another's."""
        others = {
            id(mine): other
            for of_weights in self._of_each_weight()
            for mine, other in zip(
                _handles(of_weights[known.place]),
                _handles(of_weights[place]),
                strict=True,
            )
        }
        captures = tuple(others.get(id(each), each) for each in known.first.captures)
        return dataclasses.replace(known.first, captures=captures)

    def _of_each_weight(self) -> list[list[Any]]:
        """The weights, and each list that the optimizer has of something of each."""
        weights = variables_built_with(self._optimizer)
        return [weights] + [
            value
            for value in vars(self._optimizer).values()
            if isinstance(value, list)
            and len(value) == len(weights)
            and all(isinstance(each, keras.Variable) for each in value)
        ]


def _is_plain(gradient: Any, variable: Any) -> bool:
    """Not rows of a table, and not a part of a variable."""
    is_graph = not tf.executing_eagerly()
    return (
        is_graph
        and isinstance(gradient, tf.Tensor)
        and isinstance(variable, tf.Variable)
    )


def _handles(variable: Any) -> list[Any]:
    value = getattr(variable, "value", variable)
    return [own.handle for own in getattr(value, "values", (value,))]


def _are_alike(first: TracedAlone, second: TracedAlone) -> bool:
    pairs = zip(first.captures, second.captures, strict=False)
    return (
        first.signature == second.signature
        and len(first.captures) == len(second.captures)
        and all(mine is other for mine, other in pairs)
        and have_one_content(first, second)
    )
