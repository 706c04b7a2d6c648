"""Builds a model from its first batch, or leaves that to its `train_step`.

Under a strategy Keras calls a model on the shapes of its first batch before it trains;
on one device it does not, so a model that only its `train_step` can call trains there.
Such a model, and several optimizers of a model with its own `train_step`, are built
while that is traced: Keras would build the compiled optimizer for all variables.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp._private import keras_calls
from tfdp.errors import TfdpError
from tfdp.seams.replace import instance_attributes, replace_for_good
from tfdp.seams.table import MODEL
from tfdp.step.find_optimizers import optimizers_of
from tfdp.tracing.keras_steps import is_stock_step
from tfdp.tracing.rows import row_like, without_padding


def _from_plain_batch(original: Callable[..., None]) -> Callable[..., None]:
    """Keras' `_symbolic_build`, in a strategy of tfdp from no `PaddedBatch`."""

    @functools.wraps(original)
    def symbolic_build(
        model: Any, iterator: Any = None, data_batch: Any = None
    ) -> None:
        is_ours = keras_calls.is_of_replicas(model.distribute_strategy)
        if keras_calls.model_to_build() is not model or not is_ours:
            return original(model, iterator=iterator, data_batch=data_batch)
        if type(model).call is keras.Model.call:
            return None  # it cannot be called on a batch
        is_stock = is_stock_step(model.train_step)
        without = contextlib.nullcontext() if is_stock else _without_optimizer(model)
        try:
            with keras_calls.reading_ended(), without:
                batch = _with_a_row(without_padding(data_batch))
                original(model, iterator=iterator, data_batch=batch)
        except Exception as error:
            # One device does not call a built model: some cannot be called without
            # training (RandomCrop), or without ragged tensors.
            if is_stock and (not model.built or isinstance(error, TfdpError)):
                raise
            logging.getLogger("tfdp").debug(
                "model %s is built by its train_step: %s", model.name, error
            )
        return None

    return symbolic_build


replace_for_good(MODEL, "_symbolic_build", _from_plain_batch)


def _with_a_row(batch: Any) -> Any:
    """The batch; on a host without rows with a synthetic one, as layers refuse none."""

    def of(value: Any) -> Any:
        shape = tf.TensorShape(getattr(value, "shape", None))
        if not shape.rank or shape[0] != 0:
            return value
        return row_like(value if tf.is_tensor(value) else tf.convert_to_tensor(value))

    return tf.nest.map_structure(of, batch, expand_composites=False)


def _without_optimizer(model: Any) -> contextlib.AbstractContextManager:
    is_one_of_several = model.optimizer and len(optimizers_of(model)) > 1
    if not is_one_of_several:
        return contextlib.nullcontext()
    return instance_attributes(model.optimizer, {"built": True})
