"""Keras' per-thread state while it calls layers: training mode, autocasting.

Keras has one call context per thread and outermost call; inner layers write into it.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.names import get_autocast_scope, keras_state

# Keras' names.
INPUT_SPEC = "_input_spec"
#: Methods of a layer that its call does not use; Keras puts some on each instance.
NOT_OF_CALLS = frozenset(
    "build build_from_config compute_output_shape compute_output_spec get_config "
    "get_build_config from_config save_own_variables load_own_variables quantize "
    "enable_lora quantized_build".split()
)
CALL_CONTEXT, AUTOCAST_SCOPE = "current_call_ctx", "autocast_scope"


def call_context() -> Any:
    """A copy of the current call context for `calling_as`; None: outside of layers."""
    return copy.copy(keras_state.get_global_attribute(CALL_CONTEXT))


def calling_as(context: Any) -> contextlib.AbstractContextManager[None]:
    """Calls layers with a context from `call_context`."""
    return keras_attribute(CALL_CONTEXT, copy.copy(context))


@contextlib.contextmanager
def keras_attribute(name: str, value: Any) -> Iterator[None]:
    """Sets a Keras attribute of this thread temporarily."""
    outside = keras_state.get_global_attribute(name)
    keras_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        keras_state.set_global_attribute(name, outside)


def autocast_dtype() -> tf.DType | None:
    """The float type in which the current layer computes; None: outside of layers."""
    dtype = getattr(get_autocast_scope(), "dtype", None)
    return None if dtype is None else tf.as_dtype(dtype)


def autocasting_as(scope: Any) -> contextlib.AbstractContextManager[None]:
    """Reads variables with a scope from `get_autocast_scope`.

    Never in a new scope without a type: there Keras reads in its default type.
    """
    return keras_attribute(AUTOCAST_SCOPE, scope)


def stored_value(variable: keras.Variable) -> Any:
    """A variable's stored value, without autocasting."""
    with autocasting_as(None):
        return variable.value


def layout_map_of(distribution: Any) -> Any:
    """The `LayoutMap` of a `ModelParallel`, for which Keras has no public name."""
    return distribution._layout_map


def replaced_in(layer: Any, of_keras: type) -> str:
    """The name of what a layer, or its class, has instead of Keras' own; "": nothing.

    `of_keras`: a class of Keras' that the layer is an instance of. What builds, saves
    or describes a layer does not count.
    """
    kinds = of_keras.__mro__[: of_keras.__mro__.index(keras.layers.Layer)]
    for kind in kinds:
        for name, value in vars(kind).items():
            is_code = callable(value) or isinstance(value, property)
            if not is_code or name.startswith("__") or name in NOT_OF_CALLS:
                continue
            own = inspect.getattr_static(of_keras, name)
            has = inspect.getattr_static(type(layer), name)
            if has is not own or name in vars(layer):
                return name
    return ""


def is_attention(layer: Any) -> bool:
    """Whether a layer is a built attention as Keras made it, by heads."""
    return layer.built and any(
        isinstance(layer, kind)
        and not replaced_in(layer, kind)
        and type(layer._softmax) is keras.layers.Softmax
        for kind in (
            keras.layers.MultiHeadAttention,
            keras.layers.GroupQueryAttention,
        )
    )


def projections_of(attention: Any) -> list[Any]:
    """The layers of an attention of Keras' that make heads; last, that which joins
    them."""
    names = ("_query_dense", "_key_dense", "_value_dense", "_gate_dense")
    made = [getattr(attention, name, None) for name in (*names, "_output_dense")]
    return [layer for layer in made if layer is not None]
