"""Keras builds a model from its first batch: from the plain one."""

from __future__ import annotations

from typing import Any

from tfdp._tf.padded_batch import without_padding

__all__ = ["builds_from_plain_batch"]


def builds_from_plain_batch(model: Any) -> None:
    """Lets the symbolic build that `model` is about to do see a batch without marks.

    Keras takes the strategy's scope right before it. With one replica it does not ask
    the strategy for the batch, which may be a `PaddedBatch`.
    """

    def symbolic_build(iterator: Any = None, data_batch: Any = None) -> None:
        vars(model).pop("_symbolic_build", None)
        model._symbolic_build(iterator=iterator, data_batch=without_padding(data_batch))

    # The dictionary, not setattr: Keras' objects track what is set on them.
    vars(model)["_symbolic_build"] = symbolic_build
