"""Which model a checkpoint is of, as Keras describes it: layers, and no code."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import keras

from tfdp._private.keras_models import variables_made_at_the_end
from tfdp._private.optimizer_hooks import variables_built_with
from tfdp.errors import ConfigurationError, DataError
from tfdp.step.find_optimizers import innermost_optimizers, optimizers_of

#: A longer description holds tables, which are nobody's layers.
MOST_CHARACTERS = 2**24
_described: weakref.WeakKeyDictionary[keras.Model, str | None]
_described = weakref.WeakKeyDictionary()


def architecture_of(model: keras.Model) -> str | None:
    """The description of a model, as JSON; None: Keras has none of it.

    Cost: made once for each model; 0.1 s and 170 kB for a ResNet50, on a busy machine.
    """
    if model not in _described:
        _described[model] = _description(model)
    return _described[model]


def _description(model: keras.Model) -> str | None:
    # Whatever the `get_config` of somebody's layer may raise: a checkpoint is whole
    # without it.
    with contextlib.suppress(Exception):
        said = keras.saving.serialize_keras_object(model)
        said.pop("compile_config", None)
        text = json.dumps(said)
        return text if len(text) <= MOST_CHARACTERS else None
    return None


def model_of(text: str | None, shapes: Sequence[tuple[int, ...]]) -> keras.Model:
    """A new model of a description that came with a file.

    Only classes of Keras and registered ones are made, and no lambda: nothing in the
    description is executed. No memory is taken before the variables are seen to have
    the shapes that the file has numbers for.

    Args:
      text: what `architecture_of` returned.
      shapes: of the model's variables, in their order.

    Raises:
      DataError: no model can be made of it.
    """
    if text is None:
        raise DataError("Keras had no description of the model")
    try:
        with variables_made_at_the_end():
            model = keras.models.model_from_json(text)
            if not isinstance(model, keras.Model) or not model.built:
                raise ValueError("it describes no model that is built")
            found = [tuple(variable.shape) for variable in model.variables]
            if found != list(shapes):
                raise ValueError(
                    f"it describes {len(found)} variables, and there are numbers for "
                    f"{len(shapes)}, or for other shapes"
                )
    except Exception as error:  # whatever Keras raises for what is none
        raise DataError(
            f"Keras cannot make the model from its description "
            f"({type(error).__name__}: {str(error)[:300]})"
        ) from error
    return model


# Which optimizers a model has, and which variables each of them updates.
#
# A checkpoint says so, as shapes alone do not tell: SGD with momentum has the same as
# Lion, and a model whose first layer is frozen may have the same as one whose second
# is. And an optimizer that a `train_step` of one's own calls is built in the first
# step, with variables that nobody knows before.


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
