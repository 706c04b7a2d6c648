"""Which weights have gradients that are rows of a table, and how many rows a batch has.

Keras' gradient of an `Embedding` is a row for each word of the batch; it is whole where
the table is small, or is used for more than that layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp._private.keras_models import layers_within
from tfdp._private.names import in_compiled_function
from tfdp._private.step_ops import (
    MAY_CALL,
    given_to,
    graphs_called,
    is_compiled_by_xla,
    is_resource,
)
from tfdp.exchange.sparse import SMALL_TABLE_BYTES, merge_rows
from tfdp.tracing.replica_invariance import outermost

INDEX_BYTES = 4  # Keras looks words up by int32


@dataclasses.dataclass(frozen=True)
class Table:
    """The table of an `Embedding`.

    Args:
      variable: its weights; None: they are not held.
      rows: that it has.
      row_bytes: of one row with its place.
      words: that a sample has of it.
      input_place: which of the model's inputs the words are; None: none, or several.
    """

    variable: keras.Variable | None
    rows: int
    row_bytes: int
    words: int
    input_place: int | None

    @property
    def size_bytes(self) -> int:
        """Of the whole table."""
        return self.rows * (self.row_bytes - INDEX_BYTES)

    def sent_bytes(self, samples: int, adds_rows: bool) -> int:
        """Of the rows that so many samples have at most.

        Args:
          samples: of a replica's batch.
          adds_rows: whether each row is sent once, however often its word occurs.
        """
        rows = samples * self.words
        return self.row_bytes * (min(rows, self.rows) if adds_rows else rows)

    def sent_bytes_of(self, inputs: Sequence[Any], adds_rows: bool) -> int:
        """Of the rows that this very batch has.

        Args:
          inputs: one array for each of the model's inputs, of a replica's batch.
          adds_rows: see `sent_bytes`.
        """
        samples = len(inputs[0]) if len(inputs) else 0
        place = self.input_place
        if not adds_rows or place is None or place >= len(inputs):
            return self.sent_bytes(samples, adds_rows)
        return self.row_bytes * len(np.unique(np.asarray(inputs[place])))


def tables_of(network: keras.Model) -> list[Table]:
    """The tables of a built model whose gradients are rows.

    A table that a model written by hand looks things up in by itself is not found, nor
    one whose number of words in a sample is not known: those count as whole.
    """
    given = [id(tensor) for tensor in getattr(network, "inputs", None) or ()]
    trained = {id(variable) for variable in network.trainable_variables}
    found = []
    for layer in layers_within(network):
        if not isinstance(layer, keras.layers.Embedding) or not layer.built:
            continue
        variable = layer.embeddings
        words = _words_of(layer)
        if id(variable) not in trained or words is None:
            continue
        rows, width = variable.shape
        item_bytes = np.dtype("float32").itemsize
        table = Table(
            variable,
            rows,
            width * item_bytes + INDEX_BYTES,
            words,
            given.index(id(layer.input)) if id(layer.input) in given else None,
        )
        if table.size_bytes > SMALL_TABLE_BYTES:
            found.append(table)
    return found


def _words_of(layer: keras.layers.Embedding) -> int | None:
    try:
        shape = layer.input.shape[1:]
    except AttributeError:  # called several times, or by hand
        return None
    return None if None in shape else math.prod(shape)


# Tables whose rows an update changes in place are read where they lie, too.
#
# TensorFlow changes single rows of a variable (`ResourceScatter...`: what Keras' `SGD`
# does with the gradient of an `Embedding`) only while nobody else holds the variable's
# memory, and has everybody who reads the variable afterwards get a copy of it, for
# ever: each step would copy the whole table to look some of its rows up. Where that
# mode is ended behind the update (Keras' `take` reads the variable, then gathers), a
# reader gets the memory itself; should one still hold it when rows are changed next,
# TensorFlow copies then.
#
# Saves: in each step a copy of the table, in time and in memory.


SCATTERS = "ResourceScatter"


def read_in_place(ops: Sequence[tf.Operation]) -> None:
    """Ends, behind `ops`, the copies for who reads tables that they change.

    Args:
      ops: of a step, whose graph is still being built.
    """
    if in_compiled_function():
        return  # XLA changes no variable in place, and knows no such mode
    handles = {id(handle): handle for handle in _scattered(ops, {})}
    for handle in handles.values():
        # One that was there before the step; what it makes itself may never be there.
        if handle.op.type == "Placeholder":
            tf.raw_ops.DisableCopyOnRead(resource=handle)


def _scattered(
    ops: Sequence[tf.Operation], known: dict[Any, list[tf.Tensor]]
) -> Iterator[tf.Tensor]:
    """The handles of variables of which `ops` change rows, some of them twice."""
    for op in ops:
        if op.type.startswith(SCATTERS):
            yield op.inputs[0]
        elif op.type in MAY_CALL and not is_compiled_by_xla(op):
            for inner in graphs_called(op):
                yield from _scattered_within(inner, op, known)


def _scattered_within(
    inner: Any, op: tf.Operation, known: dict[Any, list[tf.Tensor]]
) -> Iterator[tf.Tensor]:
    if inner not in known:
        known[inner] = list(_scattered(inner.get_operations(), known))
    own = list(map(id, known[inner]))
    for argument, given in zip(inner.inputs, given_to(inner, op.inputs), strict=False):
        if id(argument) in own and is_resource(given):
            yield given


# Rows of an embedding that occur several times in a batch: whether they may be added.
#
# Keras' gradient of a table has one row for each occurrence. An optimizer that is
# linear in them makes the same update of their sum; one that squares each (Adam, most
# others), or clips, does not: on one device, too, it squares them one by one.
#
# Other gradients have each row once on one device: those of a product with a sparse
# matrix (`keras.Input(sparse=True)` before `Dense`), and of
# `tf.nn.embedding_lookup_sparse`. Replicas' rows of one index are parts of that row,
# and are added for every optimizer.


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


def sums_repeated_rows(optimizer: keras.optimizers.Optimizer) -> bool:
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


def as_requested(values: Sequence[Any]) -> list[Any]:
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
