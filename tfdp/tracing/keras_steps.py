"""Recognizes Keras' steps, and handles the batches and results that it passes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.functions import python_function_of
from tfdp._private.names import PerReplica

STEPS = ("train_step", "test_step")


def representative_batch(batch: Any) -> Any:
    """The part of the first replica that has samples, in the structure of `batch`."""
    return tf.nest.map_structure(_representative, batch, expand_composites=False)


def _representative(value: Any) -> Any:
    if not isinstance(value, PerReplica):
        return value
    return next((part for part in value.values if _rows(part) != 0), value.values[0])


def _rows(part: Any) -> int | None:
    if isinstance(part, tf.RaggedTensor):
        return int(part.nrows())
    if isinstance(part, tf.SparseTensor):
        return int(part.dense_shape[0])
    return part.shape[0] if part.shape.rank else None


def name_of_step(fn: Any) -> str:
    """ "train_step" or "test_step" where `fn` is that of a Keras model; else ""."""
    model = getattr(fn, "__self__", None)
    if not isinstance(model, keras.Model):
        return ""
    # Not by the function's name: a class may assign any function, or a decorated one.
    steps = {name: python_function_of(getattr(model, name)) for name in STEPS}
    return next((name for name, step in steps.items() if step == fn), "")


def is_stock_step(fn: Any) -> bool:
    """Whether `fn` is Keras' own step of a model."""
    name = name_of_step(fn)
    return bool(name) and getattr(fn, "__func__", None) is getattr(keras.Model, name)


def is_predict_step(fn: Any) -> bool:
    """Whether Keras runs `fn` in `predict` and concatenates the replicas' rows."""
    return "make_predict_function" in getattr(fn, "__qualname__", "")


def rows_of_first_replica(result: Any) -> Any:
    """`result` with the rows of replica 0 only; in `predict_on_batch` all have all
    rows."""

    def first_rows(value: Any) -> Any:
        if not isinstance(value, PerReplica):
            return value
        first, *others = value.values
        if not first.shape.rank:
            return first
        return PerReplica((first, *(part[:0] for part in others)))

    return tf.nest.map_structure(first_rows, result)


VARIABLES = (keras.Variable, tf.Variable)


def as_tensors(given: Iterable[Any]) -> list[Any]:
    """`given`, with the values of variables; other elements are unchanged."""
    return [
        tf.convert_to_tensor(one) if isinstance(one, VARIABLES) else one
        for one in given
    ]
