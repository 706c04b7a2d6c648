"""Keras builds a model from its first batch: from the plain one, and where it can.

Under a strategy Keras calls a model on the shapes of its first batch before it trains.
On one device it leaves that out, so that a model of which only `train_step` says what
to do with a batch trains there as it is. Such a model is left to its `train_step` here,
too: what is not built yet is built while that is traced. So are optimizers of which a
model of its own `train_step` has several: Keras would build the compiled one, which may
be its default, for the variables of all of them.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.instance_attributes import instance_attributes
from tfdp._private.keras_models import BUILD, build_symbolically
from tfdp.errors import TfdpError
from tfdp.step.dummy_rows import row_like
from tfdp.step.find_optimizers import optimizers_of
from tfdp.tracing.keras_steps import is_stock_step
from tfdp.tracing.padded_batch import without_padding


def builds_from_plain_batch(model: Any) -> None:
    """Lets the symbolic build that `model` is about to do see a batch without marks.

    Keras takes the strategy's scope right before it. With one replica it does not ask
    the strategy for the batch, which may be a `PaddedBatch`.
    """

    def symbolic_build(iterator: Any = None, data_batch: Any = None) -> None:
        vars(model).pop(BUILD, None)
        if not has_call(model):
            return
        is_stock = is_stock_step(model.train_step)
        try:
            with contextlib.nullcontext() if is_stock else _without_optimizer(model):
                batch = _with_a_row(without_padding(data_batch))
                build_symbolically(model, iterator=iterator, data_batch=batch)
        except Exception as error:
            # One device would not have called a built model: some stand no call without
            # training (RandomCrop), or without the ragged tensors that they are given.
            if is_stock and (not model.built or isinstance(error, TfdpError)):
                raise
            logging.getLogger("tfdp").debug(
                "model %s is left to its train_step: %s", model.name, error
            )

    # The dictionary, not setattr: Keras' objects track what is set on them.
    vars(model)[BUILD] = symbolic_build


def _with_a_row(batch: Any) -> Any:
    """The batch; on a host without rows with one, for layers refuse none."""

    def of(value: Any) -> Any:
        shape = tf.TensorShape(getattr(value, "shape", None))
        if not shape.rank or shape[0] != 0:
            return value
        return row_like(value if tf.is_tensor(value) else tf.convert_to_tensor(value))

    return tf.nest.map_structure(of, batch, expand_composites=False)


def _without_optimizer(model: Any) -> contextlib.AbstractContextManager:
    """While this lasts, Keras takes one of several optimizers for built."""
    is_one_of_several = model.optimizer and len(optimizers_of(model)) > 1
    if not is_one_of_several:
        return contextlib.nullcontext()
    return instance_attributes(model.optimizer, {"built": True})


def has_call(model: Any) -> bool:
    """Whether `model` can be called on a batch."""
    return type(model).call is not keras.Model.call
