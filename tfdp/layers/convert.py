"""`convert_batch_normalization`: a model's layers made synchronous."""

from __future__ import annotations

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
    """A copy of `model` that normalises over the samples of all replicas.

    Every `keras.layers.BatchNormalization` becomes a `SyncBatchNormalization` of the
    same name and arguments; in nested models and in layers that hold another
    (`TimeDistributed`) too. The weights are copied. A compiled model gives a compiled
    copy, with a fresh optimizer.

    Call it in the scope of the strategy that is to train the copy.

    Args:
      model: a Sequential or functional model.
      group_size: see `SyncBatchNormalization`; layers that are synchronous already
        get it too.

    Returns:
      The copy, of the class of `model`.

    Raises:
      ConfigurationError: for a subclassed model, whose layers are made by its own
        code; for a layer that makes a BatchNormalization in its own code, or a class
        derived from it; for a bad `group_size`.

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

    def clone_layer(layer: Any) -> Any:
        return _clone_layer(layer, group_size)

    copy = keras.models.clone_model(model, clone_function=clone_layer, recursive=True)
    _check_copy(model, copy)
    copy.set_weights(model.get_weights())
    return copy


def _clone_layer(layer: Any, group_size: int | None) -> Any:
    """A new layer or operation like `layer`, without its weights' values."""
    if type(layer) in (keras.layers.BatchNormalization, SyncBatchNormalization):
        return SyncBatchNormalization.from_config(
            _synchronous_config(layer.get_config(), group_size)
        )
    if isinstance(layer, keras.Model):
        _check_model(layer)
    if isinstance(layer, keras.layers.Lambda):
        # The code is the caller's own and already in this process, not from a file.
        return type(layer).from_config(layer.get_config(), safe_mode=False)
    config = layer.get_config()
    if _plain_layers(layer):
        config = _replace_in_config(config, group_size)
    return type(layer).from_config(config)


def _synchronous_config(
    config: dict[str, Any], group_size: int | None
) -> dict[str, Any]:
    return {**config, "synchronized": True, "group_size": group_size}


def _replace_in_config(config: Any, group_size: int | None) -> Any:
    """`config` with each serialised BatchNormalization in it made synchronous."""
    if isinstance(config, (list, tuple)):
        return type(config)(_replace_in_config(item, group_size) for item in config)
    if not isinstance(config, dict):
        return config
    replaced = {
        key: _replace_in_config(value, group_size) for key, value in config.items()
    }
    if (config.get("module"), config.get("class_name")) == (
        "keras.layers",
        "BatchNormalization",
    ):
        like = keras.saving.serialize_keras_object(SyncBatchNormalization())
        inner = _synchronous_config(replaced["config"], group_size)
        return {**replaced, **like, "config": inner}
    return replaced


def _models(model: keras.Model) -> list[keras.Model]:
    """The model and those in it."""
    inside = tf.train.TrackableView(model).descendants()
    return [inner for inner in inside if isinstance(inner, keras.Model)]


def _lost_methods(model: keras.Model) -> ConfigurationError:
    return ConfigurationError(
        f"Keras copies the {type(model).__name__} {model.name!r} as a Functional, "
        "without its own methods. Give it a constructor with inputs, outputs and name, "
        "or write tfdp.layers.SyncBatchNormalization(...) in it."
    )


def _plain_layers(layer: Any) -> list[Any]:
    """The layers in `layer` that normalise without the other replicas."""
    if not isinstance(layer, keras.Layer):
        return []
    return [
        inner
        for inner in tf.train.TrackableView(layer).descendants()
        if isinstance(inner, keras.layers.BatchNormalization)
        and not isinstance(inner, SyncBatchNormalization)
    ]


def _check_model(model: Any) -> None:
    """Refuses what is not built of layers that Keras can copy one by one."""
    functional = isinstance(model, keras.Sequential) or hasattr(model, "operations")
    if not isinstance(model, keras.Model) or not functional:
        raise ConfigurationError(
            "convert_batch_normalization takes a Sequential or functional keras.Model. "
            f"Received: {type(model).__name__} {getattr(model, 'name', '')!r}. In a "
            "class of your own, write tfdp.layers.SyncBatchNormalization(...) in the "
            "place of keras.layers.BatchNormalization(...), with the same arguments."
        )


def _check_constructors(model: keras.Model) -> None:
    """Refuses a model, or one in it, that cannot be made from inputs and outputs.

    Keras would copy it as a plain Functional, without its own methods, or (3.12) end
    in a TypeError.
    """
    for inner in _models(model):
        if isinstance(inner, keras.Sequential) or not hasattr(inner, "operations"):
            continue
        try:
            inspect.signature(type(inner)).bind(None, None, name="")
        except TypeError:
            raise _lost_methods(inner) from None


def _check_copy(model: keras.Model, copy: keras.Model) -> None:
    """Refuses a copy that lost code or kept a layer that is not synchronous."""
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
