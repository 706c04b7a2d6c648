"""`convert_batch_normalization`: synchronizes a model's batch normalization."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import keras
import tensorflow as tf

from tfdp.errors import ConfigurationError
from tfdp.layers.sync_batch_normalization import (
    SyncBatchNormalization,
    check_group_size,
)


def convert_batch_normalization(
    model: keras.Model, group_size: int | None = None
) -> keras.Model:
    """A copy of `model` that normalizes over the samples of all replicas.

    Replaces every `keras.layers.BatchNormalization`, also in nested models and wrapper
    layers (`TimeDistributed`), by a `SyncBatchNormalization` of the same name,
    arguments and weights. A compiled model gives a compiled copy, with a fresh
    optimizer. Call it in the scope of the strategy that will train the copy.

    Args:
      model: a Sequential or functional model.
      group_size: see `SyncBatchNormalization`; also set on layers synchronized already.

    Returns:
      The copy, of the class of `model`.

    Raises:
      ConfigurationError: for a subclassed model; for a layer that creates a
        BatchNormalization itself, or a class derived from it; for a bad `group_size`.

    ```python
    import keras
    import tfdp

    with tfdp.auto_strategy().scope():
        model = keras.applications.MobileNetV2(weights=None, input_shape=(32, 32, 3))
        model = tfdp.layers.convert_batch_normalization(model)
    ```
    """
    check_group_size(group_size)
    _check_model(model)
    _check_constructors(model)

    clone_layer = functools.partial(_clone_layer, group_size=group_size)
    copy = keras.models.clone_model(model, clone_function=clone_layer, recursive=True)
    _check_copy(model, copy)
    copy.set_weights(model.get_weights())
    return copy


def _clone_layer(layer: Any, group_size: int | None) -> Any:
    """A new layer or operation like `layer`, without its weights' values."""
    if type(layer) in (keras.layers.BatchNormalization, SyncBatchNormalization):
        config = _synchronous_config(layer.get_config(), group_size)
        return SyncBatchNormalization.from_config(config)
    if isinstance(layer, keras.Model):
        _check_model(layer)
    if isinstance(layer, keras.layers.Lambda):
        # The code is the caller's and already in this process, not from a file.
        return type(layer).from_config(layer.get_config(), safe_mode=False)
    config = layer.get_config()
    if _plain_layers(layer):
        config = _replace_in_config(config, group_size)
    return type(layer).from_config(config)


def _synchronous_config(config: dict[str, Any], group_size: Any) -> dict[str, Any]:
    return {**config, "synchronized": True, "group_size": group_size}


def _replace_in_config(config: Any, group_size: int | None) -> Any:
    """`config` with each serialized BatchNormalization in it synchronized."""
    if isinstance(config, (list, tuple)):
        return type(config)(_replace_in_config(item, group_size) for item in config)
    if not isinstance(config, dict):
        return config
    replaced = {k: _replace_in_config(v, group_size) for k, v in config.items()}
    kind = config.get("module"), config.get("class_name")
    if kind == ("keras.layers", "BatchNormalization"):
        like = keras.saving.serialize_keras_object(SyncBatchNormalization())
        inner = _synchronous_config(replaced["config"], group_size)
        return {**replaced, **like, "config": inner}
    return replaced


def _models(model: keras.Model) -> list[keras.Model]:
    within = tf.train.TrackableView(model).descendants()
    return [inner for inner in within if isinstance(inner, keras.Model)]


def _lost_methods(model: keras.Model) -> ConfigurationError:
    return ConfigurationError(
        f"Keras copies the {type(model).__name__} {model.name!r} as a Functional, "
        "without its own methods. Give it a constructor with inputs, outputs and name, "
        "or write tfdp.layers.SyncBatchNormalization(...) in it."
    )


def _plain_layers(layer: Any) -> list[Any]:
    """The layers in `layer` that normalize over their own replica only."""
    if not isinstance(layer, keras.Layer):
        return []
    within = tf.train.TrackableView(layer).descendants()
    normalizing = [x for x in within if isinstance(x, keras.layers.BatchNormalization)]
    return [x for x in normalizing if not isinstance(x, SyncBatchNormalization)]


def _check_model(model: Any) -> None:
    """Refuses a model that Keras cannot copy layer by layer."""
    functional = isinstance(model, keras.Sequential) or hasattr(model, "operations")
    if not isinstance(model, keras.Model) or not functional:
        raise ConfigurationError(
            "convert_batch_normalization takes a Sequential or functional keras.Model. "
            f"Received: {type(model).__name__} {getattr(model, 'name', '')!r}. In your "
            "own class, write tfdp.layers.SyncBatchNormalization(...) instead of "
            "keras.layers.BatchNormalization(...), with the same arguments."
        )


def _check_constructors(model: keras.Model) -> None:
    """Refuses models not made from inputs and outputs: Keras would lose methods."""
    for inner in _models(model):
        if isinstance(inner, keras.Sequential) or not hasattr(inner, "operations"):
            continue
        try:
            inspect.signature(type(inner)).bind(None, None, name="")
        except TypeError:
            raise _lost_methods(inner) from None


def _check_copy(model: keras.Model, copy: keras.Model) -> None:
    """Refuses a copy that lost code or kept a layer that is not synchronized."""
    kept = {type(inner) for inner in _models(copy)}
    for inner in _models(model):
        if type(inner) not in kept:
            raise _lost_methods(inner)
    left = _plain_layers(copy)
    if left:
        raise ConfigurationError(
            "Cannot convert "
            + ", ".join(f"{type(layer).__name__} {layer.name!r}" for layer in left)
            + ": derived from BatchNormalization, or made in another layer's own code. "
            "Derive from, or write, tfdp.layers.SyncBatchNormalization there."
        )
