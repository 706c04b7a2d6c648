"""Which model a checkpoint is of, as Keras describes it: layers, and no code."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Sequence

import keras

from tfdp._private.keras_models import variables_made_at_the_end
from tfdp.errors import DataError

__all__ = ["architecture_of", "model_of"]

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
