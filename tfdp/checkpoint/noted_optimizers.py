"""Which optimizers a model has, and which variables each of them updates.

A checkpoint says so, as shapes alone do not tell: SGD with momentum has the same as
Lion, and a model whose first layer is frozen may have the same as one whose second is.
And an optimizer that a `train_step` of one's own calls is built in the first step, with
variables that nobody knows before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import keras

from tfdp._private.optimizer_hooks import variables_built_with
from tfdp.errors import ConfigurationError
from tfdp.step.held_optimizers import innermost_optimizers, optimizers_of

__all__ = ["NotedOptimizer", "build_as_noted", "noted_optimizers"]


@dataclass(frozen=True)
class NotedOptimizer:
    """What the manifest says of one.

    Args:
      names: of its class, without wrappers; of several, where it is a group.
      places: in `model.variables`, of those it was built with; None: it was not built,
        or they are not the model's.
      group_size: how many replicas step together while other groups train apart
        (`tfdp.sync`); None: none do.
    """

    names: tuple[str, ...]
    places: tuple[int, ...] | None
    group_size: int | None = None


def noted_optimizers(model: keras.Model) -> tuple[NotedOptimizer, ...]:
    """Those of a model, in the order of `optimizers_of`."""
    places = {id(variable): at for at, variable in enumerate(model.variables)}
    return tuple(
        NotedOptimizer(
            tuple(type(one).__name__ for one in innermost_optimizers(optimizer)),
            _places(optimizer, places),
            getattr(getattr(optimizer, "rounds", None), "group_size", None),
        )
        for optimizer in optimizers_of(model)
    )


def _places(
    optimizer: keras.optimizers.Optimizer, places: dict[int, int]
) -> tuple[int, ...] | None:
    if not optimizer.built:
        return None
    found = [places.get(id(v)) for v in variables_built_with(optimizer)]
    known = tuple(place for place in found if place is not None)
    return known if len(known) == len(found) else None


def build_as_noted(model: keras.Model, noted: Sequence[NotedOptimizer]) -> None:
    """Builds optimizers that are not built yet as those of the checkpoint were.

    Raises:
      ConfigurationError: they are others.
    """
    here = noted_optimizers(model)
    variables = model.variables
    if [one.names for one in here] != [one.names for one in noted]:
        raise ConfigurationError(
            f"The checkpoint is of another optimizer: {_text(noted)}, not "
            f"{_text(here)}. Go on with that one, or restore the weights alone "
            "(weights_only=True)."
        )
    for optimizer, mine, theirs in zip(optimizers_of(model), here, noted, strict=True):
        if theirs.places is None or theirs.places == mine.places:
            continue
        if optimizer.built or max(theirs.places, default=-1) >= len(variables):
            raise ConfigurationError(
                f"{theirs.names[0]} updates {len(variables_built_with(optimizer))} "
                f"variables here, and {len(theirs.places)} in the checkpoint, or "
                "others: layers are trainable here that were not, or the other way "
                "round. Freeze the same ones, or restore the weights alone "
                "(weights_only=True)."
            )
        with model.distribute_strategy.scope():
            optimizer.build([variables[place] for place in theirs.places])


def _text(noted: Sequence[NotedOptimizer]) -> str:
    return ", ".join("+".join(one.names) for one in noted) or "none"
