"""What a block must not do that is computed twice, and how it is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfdp._private.op_types import ASSIGNS, DRAWS
from tfdp._private.step_ops import operations_within
from tfdp.errors import ConfigurationError

__all__ = [
    "other_draws",
    "refuse_added_losses",
    "refuse_assigned_state",
    "refuse_assigned_weights",
    "refuse_other_draws",
    "refuse_ragged",
]


def refuse_ragged(layer: keras.layers.Layer, given: Sequence[Any]) -> None:
    """Refuses a layer that is given a ragged tensor.

    Args:
      layer: the block, as in the other refusals.
      given: what it is called with.

    Raises:
      ConfigurationError: with what to do, as the others do.
    """
    if any(isinstance(value, tf.RaggedTensor) for value in given):
        _refuse(
            layer,
            "is given a ragged tensor, whose gradient would be lost in a block that "
            "is computed again",
        )


def refuse_added_losses(layer: keras.layers.Layer, number: int) -> None:
    """Refuses a layer that has called `add_loss` so many times."""
    if number:
        _refuse(
            layer,
            "calls add_loss, whose gradient would be lost in a block that is computed "
            "again",
        )


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
            _refuse(
                layer,
                f"assigns to {variable.path!r} while it computes "
                "(keras.layers.SpectralNormalization does), and when it is computed "
                "again that weight is another one",
            )


def refuse_assigned_state(
    layer: keras.layers.Layer, operations: Sequence[tf.Operation]
) -> None:
    """Refuses a layer that assigns where Keras does not know of it.

    To variables of TensorFlow, which are no weights, or in a `tf.function` of its own,
    whose graph is there since the first pass: with its draws, moving statistics and
    counters.

    Args:
      layer: that was computed once more, without updates of Keras' variables.
      operations: of that pass.

    Raises:
      ConfigurationError: with what to do.
    """
    for operation in operations:
        if operation.type in ASSIGNS:
            _refuse(
                layer,
                f"assigns to a tf.Variable ({operation.name}), and would assign once "
                "more when it is computed again",
                "Make it a weight (add_weight(trainable=False))",
            )
        if any(inner.type in ASSIGNS for inner in operations_within([operation])):
            _refuse(
                layer,
                f"draws random numbers or assigns to a variable in a tf.function "
                f"({operation.name}), and would do so once more when it is computed "
                "again",
                "Do that outside of the tf.function",
            )


def refuse_other_draws(layer: keras.layers.Layer, draws: str) -> None:
    """Refuses a layer that would draw other numbers; `draws`: its `other_draws`."""
    if draws:
        _refuse(
            layer,
            f"draws random numbers by TensorFlow ({draws}), and would draw others "
            "when it is computed again",
            "Draw by keras.random",
        )


def other_draws(operations: Sequence[tf.Operation]) -> str:
    """The kind of one that draws numbers which nobody can have again; "": none."""
    made = operations_within(operations)
    return next((str(op.type) for op in made if op.type in DRAWS), "")


def _refuse(layer: keras.layers.Layer, why: str, instead: str = "") -> NoReturn:
    """Says what a layer does, and what it might do instead, and what to do."""
    way = f"{instead}, or leave" if instead else "Leave"
    raise ConfigurationError(
        f"The layer {layer.name!r} {why}. {way} it out: "
        "tfdp.remat(model, policy=lambda layer: layer is not ...)."
    )
