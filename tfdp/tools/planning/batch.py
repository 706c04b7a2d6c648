"""A batch of a given number of rows, in whatever form the caller knows its batches."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp._private.keras_models import given_losses
from tfdp.checks import is_whole
from tfdp.errors import ConfigurationError

__all__ = ["Batch", "batch_of"]

FORMS = (
    "a number of rows of the global batch, for a functional or sequential model; "
    "arrays, (x, y), of one global batch; or a dataset's element_spec of one"
)

# TensorFlow counts no more elements along a dimension in many of its kernels.
MOST_ROWS = 2**31 - 1


class Batch:
    """What a row of a batch is, and how many rows the caller asked about.

    Args:
      like: a structure of `tf.TensorSpec`, without the first dimension.
      rows: of the global batch.
    """

    def __init__(self, like: Any, rows: int):
        self.like = like
        self.rows = rows

    def zeros(self, rows: int) -> Any:
        """A batch of `rows` rows in which every number is 0 and every text empty."""
        return tf.nest.map_structure(
            lambda spec: (
                # Keras builds no model from arrays of objects, which NumPy's are.
                tf.fill((rows, *spec.shape), "")
                if spec.dtype == tf.string
                else np.zeros((rows, *spec.shape), spec.dtype.as_numpy_dtype)
            ),
            self.like,
        )

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return sum(
            int(np.prod(spec.shape)) * spec.dtype.size
            for spec in tf.nest.flatten(self.like)
        )


def batch_of(batch: Any, model: keras.Model) -> Batch:
    """What the caller's `batch` says of `model`'s batches.

    Raises:
      ConfigurationError: when it is of no known form, or leaves a dimension open.
    """
    if is_whole(batch, least=1):
        if batch > MOST_ROWS:
            raise ConfigurationError(
                f"batch must be at most {MOST_ROWS:,} rows. Received: {batch}."
            )
        return Batch(_rows_of_model(model), batch)
    if isinstance(batch, bool | int | float | str) or batch is None:
        raise ConfigurationError(f"batch must be {FORMS}. Received: {batch!r}.")
    if isinstance(batch, list):
        batch = tuple(batch)
    specs = tf.nest.map_structure(_spec_of, batch)
    rows = {spec.shape[0] for spec in tf.nest.flatten(specs) if spec.shape.rank}
    if len(rows) != 1 or None in rows:
        raise ConfigurationError(
            "All parts of a batch must have one number of rows, which is known: "
            f"batch(n, drop_remainder=True). Received: {specs}."
        )
    like = tf.nest.map_structure(
        lambda spec: tf.TensorSpec(spec.shape[1:], spec.dtype), specs
    )
    return Batch(_closed(like), rows.pop())


def _spec_of(part: Any) -> tf.TensorSpec:
    if isinstance(part, tf.TensorSpec):
        return part
    if hasattr(part, "shape") and hasattr(part, "dtype"):
        return tf.TensorSpec(part.shape, part.dtype)
    raise ConfigurationError(f"batch must be {FORMS}. Received in it: {part!r}.")


def _closed(like: Any) -> Any:
    for spec in tf.nest.flatten(like):
        if not spec.shape.is_fully_defined():
            raise ConfigurationError(
                "The memory of a step depends on every length in its batch. Received "
                f"a part of shape {spec.shape}: give arrays, or an element_spec, whose "
                "lengths are those of the largest batch."
            )
    return like


def _rows_of_model(model: keras.Model) -> Any:
    """Inputs as the model declares them, and targets as its loss wants them."""
    inputs = getattr(model, "inputs", None)
    if not inputs:
        raise ConfigurationError(
            f"The model {model.name!r} does not say what its inputs are (it is neither "
            "functional nor a Sequential with an Input), so a number of rows is not "
            f"enough. Give batch as {FORMS}."
        )
    # Keras' own structure: a list, a dictionary or one tensor.
    structure = getattr(model, "input", inputs)
    if isinstance(structure, list) and len(structure) == 1:
        [structure] = structure
    x = tf.nest.map_structure(
        lambda part: tf.TensorSpec(part.shape[1:], part.dtype), structure
    )
    losses = [str(getattr(loss, "name", loss)) for loss in given_losses(model)]
    targets = [
        _target_of(output, losses[place % len(losses)] if losses else "")
        for place, output in enumerate(model.outputs)
    ]
    y = targets[0] if len(targets) == 1 else tuple(targets)
    return _closed((x, y))


def _target_of(output: Any, loss: str) -> tf.TensorSpec:
    if "sparse" in loss:
        return tf.TensorSpec(output.shape[1:-1], tf.int32)
    return tf.TensorSpec(output.shape[1:], tf.float32)
