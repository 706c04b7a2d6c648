"""Rows of an embedding that occur several times in a batch: whether they may be added.

Keras' gradient of a table has one row for each occurrence. An optimizer that is linear
in them makes the same update of their sum; one that squares each (Adam, most others),
or clips, does not: on one device, too, it squares them one by one.

Other gradients have each row once on one device: those of a product with a sparse
matrix (`keras.Input(sparse=True)` before `Dense`), and of
`tf.nn.embedding_lookup_sparse`. Replicas' rows of one index are parts of that row, and
are added for every optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp.exchange.sparse import merge_rows
from tfdp.tracing.replica_invariance import outermost

__all__ = ["CLIPPING", "as_asked", "has_rows_once", "takes_sums_alike"]

# By their exact types: what a class of somebody else's does is not known.
LINEAR_IN_ROWS = (keras.optimizers.SGD, keras.optimizers.Lion)
# What tfdp's say of themselves that add rows before they look at them.
ADDS_ROWS_ITSELF = "adds_repeated_rows"
CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")
# Operations that give each index once: which of their outputs the indices are.
GIVE_EACH_ONCE = {
    **dict.fromkeys(("Unique", "UniqueV2"), 0),
    **{f"SparseSegment{kind}GradV2": 1 for kind in ("Mean", "SqrtN", "Sum")},
}
SAME_OR_FEWER = {"Cast", "Identity", "Reshape", "StridedSlice"}


def takes_sums_alike(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether `optimizer` makes the same update, but for rounding, of added rows.

    It is asked while a step is traced: an option that is changed later is not seen.
    """
    found = list(_all_within(optimizer))
    if any(getattr(each, name, None) for each in found for name in CLIPPING):
        return False
    return all(_is_known(each) for each in found if not _within(each))


def has_rows_once(gradient: Any) -> bool:
    """Whether one device's `gradient` has each row once, as the graph tells."""
    if not isinstance(gradient, tf.IndexedSlices):
        return False
    tensor = outermost(gradient.indices)
    while tensor is not None and not isinstance(tensor, tf.__internal__.EagerTensor):
        if tensor.op.type in GIVE_EACH_ONCE:
            return tensor.value_index == GIVE_EACH_ONCE[tensor.op.type]
        if tensor.op.type not in SAME_OR_FEWER:
            return False
        tensor = outermost(tensor.op.inputs[0])
    return False


def as_asked(values: Sequence[Any]) -> list[Any]:
    """What TensorFlow has joined of eager replicas, as `Communication` asks."""
    reducer = getattr(tf.distribute.get_strategy().extended, "reducer", None)
    communication = getattr(reducer, "communication", None)
    if communication is None or communication.repeated_rows != "sum":
        return list(values)
    return [merge_rows(v) if isinstance(v, tf.IndexedSlices) else v for v in values]


def _is_known(optimizer: keras.optimizers.Optimizer) -> bool:
    return type(optimizer) in LINEAR_IN_ROWS or ADDS_ROWS_ITSELF in vars(
        type(optimizer)
    )


def _all_within(
    optimizer: keras.optimizers.Optimizer,
) -> Iterator[keras.optimizers.Optimizer]:
    yield optimizer
    for inner in _within(optimizer):
        yield from _all_within(inner)


def _within(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.optimizers.Optimizer]:
    """A loss scaler's, or a group's."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return [inner] if inner is not None else list(getattr(optimizer, "optimizers", []))
