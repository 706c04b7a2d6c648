"""Embedding tables: weights with gradients that are slices (rows), and how many.

Keras' gradient of an `Embedding` has a row for each word of the batch; it is dense if
the table is small, or is used by more than that layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers import Optimizer

from tfdp._private.keras_layers import replaced_in, stored_value
from tfdp._private.keras_models import layers_within
from tfdp._private.optimizer_hooks import CLIPPING
from tfdp.chain.reduction import Reduction, Stage
from tfdp.exchange.sparse import SMALL_TABLE_BYTES, merge_rows, rows_once
from tfdp.lint.op_kinds import gives_each_once
from tfdp.lint.registry import is_of_graph
from tfdp.plan.shards import RowLayout
from tfdp.tracing.state_checks import has_same_rows
from tfdp.tracing.step import Step

INDEX_BYTES = 4  # Keras looks words up by int32


@dataclasses.dataclass(frozen=True)
class Table:
    """The table of an `Embedding`; `row_bytes` includes a row's index, `words` are per
    sample, `input_place` is the index of the model's only input with the words; in
    parts if its layer `looks_up_in_parts`."""

    variable: keras.Variable | None
    rows: int
    row_bytes: int
    words: int
    input_place: int | None
    is_in_parts: bool = False

    @property
    def size_bytes(self) -> int:
        return self.rows * (self.row_bytes - INDEX_BYTES)

    def sent_bytes(self, samples: int, adds_rows: bool) -> int:
        """Bytes of the rows of so many samples; `adds_rows` sums repeated rows."""
        rows = samples * self.words
        return self.row_bytes * (min(rows, self.rows) if adds_rows else rows)

    def sent_bytes_of(self, inputs: Sequence[Any], adds_rows: bool) -> int:
        """Bytes of the rows of this very batch, an array for each of the inputs."""
        samples = len(inputs[0]) if len(inputs) else 0
        place = self.input_place
        if not adds_rows or place is None or place >= len(inputs):
            return self.sent_bytes(samples, adds_rows)
        return self.row_bytes * len(np.unique(np.asarray(inputs[place])))


def tables_of(network: keras.Model) -> list[Table]:
    """The embedding tables of a built model with gradients that are rows. Those that it
    looks up by hand, or with an unknown number of words per sample, count as dense."""
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
        row_bytes = width * np.dtype("float32").itemsize + INDEX_BYTES
        place = given.index(id(layer.input)) if id(layer.input) in given else None
        in_parts = looks_up_in_parts(layer)
        table = Table(variable, rows, row_bytes, words, place, in_parts)
        if table.size_bytes > SMALL_TABLE_BYTES:
            found.append(table)
    return found


def looks_up_in_parts(layer: Any) -> bool:
    """Whether a layer looks words up as Keras does, in a table that rests by rows."""
    of_keras = keras.layers.Embedding
    if not isinstance(layer, of_keras) or not layer.built:
        return False
    replaced = replaced_in(layer, of_keras)
    # The parts of a lookup that a backward pass needs are small.
    if replaced == "call" and getattr(layer.call, "is_rematerialized", False):
        replaced = "" if type(layer).call is of_keras.call else replaced
    if replaced or layer.quantization_mode is not None or layer.lora_enabled:
        return False
    table = stored_value(layer.embeddings)
    # An optimizer may need it whole, at an owner.
    return isinstance(getattr(table, "update_layout", None), RowLayout)


def _words_of(layer: keras.layers.Embedding) -> int | None:
    try:
        shape = layer.input.shape[1:]
    except AttributeError:  # called several times, or by hand
        return None
    return None if None in shape else math.prod(shape)


# By exact type, because subclasses may do anything.
LINEAR_IN_ROWS = (keras.optimizers.SGD, keras.optimizers.Lion)
# Set by tfdp's own optimizers that sum repeated rows first.
ADDS_ROWS_ITSELF = "adds_repeated_rows"


def sums_repeated_rows(optimizer: Optimizer) -> bool:
    """Whether `optimizer` makes the same update, but for rounding, of summed rows.
    Those that square (Adam, most others) or clip rows treat occurrences of a word
    separately, on one device, too."""
    found = list(_all_within(optimizer))
    if any(getattr(each, name, None) for each in found for name in CLIPPING):
        return False
    return all(
        type(each) in LINEAR_IN_ROWS or ADDS_ROWS_ITSELF in vars(type(each))
        for each in found
        if not _within(each)
    )


def has_rows_once(gradient: Any) -> bool:
    """Whether one device's `gradient` has each row once (products with sparse
    matrices): then the replicas' rows are to be summed for every optimizer."""
    is_rows = isinstance(gradient, tf.IndexedSlices)
    if not is_rows or not is_of_graph(gradient.indices):
        return False
    return gives_each_once(gradient.indices)


class SameRows(Stage):
    """Adds rows whose indices are equal on all replicas, such as those of positions.

    Their indices do not depend on the batch, so one device's gradient has each of them
    as often as a replica's: rows are added place by place, and travel in buckets.
    """

    def before(self, reduction: Reduction) -> None:
        self._rows = {
            place: gradient
            for place, gradient in enumerate(reduction.gradients)
            if has_same_rows(gradient, reduction.step, reduction.rank)
        }
        for place, gradient in self._rows.items():
            reduction.gradients[place] = tf.convert_to_tensor(gradient.values)

    def after(self, reduction: Reduction) -> None:
        for place, gradient in self._rows.items():
            reduction.gradients[place] = tf.IndexedSlices(
                reduction.gradients[place], gradient.indices, gradient.dense_shape
            )


class TableRows(Stage):
    """Adds rows of equal index where one device's update is the same."""

    def before(self, reduction: Reduction) -> None:
        reduction.sum_rows = sums_repeated_rows(reduction.optimizer)
        is_alone = reduction.step.is_of_one
        self._once = [
            place
            for place, gradient in enumerate(reduction.gradients)
            if not is_alone and has_rows_once(gradient)
        ]

    def after(self, reduction: Reduction) -> None:
        for place in self._once:
            rows = reduction.gradients[place]
            if isinstance(rows, tf.IndexedSlices):
                reduction.gradients[place] = merge_rows(rows)


def reduce_as_one_device(
    values: Sequence[Any], step: Step, rank: Any, reduce: Callable[[list[Any]], Any]
) -> list[Any]:
    """`reduce` of a program's values, some of them slices: these get each row as often
    as one device has it, so that a norm of them is what an optimizer clips by."""
    same = [has_same_rows(value, step, rank) for value in values]
    sums = reduce([v.values if s else v for v, s in zip(values, same, strict=True)])
    results = []
    for given, is_same, total in zip(values, same, sums, strict=True):
        if is_same:
            total = tf.IndexedSlices(total, given.indices, given.dense_shape)
        results.append(rows_once(total) if has_rows_once(given) else total)
    return results


def _all_within(optimizer: Optimizer) -> Iterator[Optimizer]:
    yield optimizer
    for inner in _within(optimizer):
        yield from _all_within(inner)


def _within(optimizer: Optimizer) -> list[Optimizer]:
    inner = getattr(optimizer, "inner_optimizer", None)
    return [inner] if inner is not None else list(getattr(optimizer, "optimizers", []))
