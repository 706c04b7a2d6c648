"""Which weights have gradients that are rows of a table, and how many rows a batch has.

Keras' gradient of an `Embedding` is a row for each word of the batch; it is whole where
the table is small, or is used for more than that layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfdp._private.keras_models import layers_within
from tfdp.exchange.sparse import SMALL_TABLE_BYTES

__all__ = ["Table", "tables_of"]

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
