"""Whether something is of the rows of all replicas already, told from the graph."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.tracing.loss_shares import key_of
from tfdp.tracing.own_rows import SHAPES
from tfdp.tracing.replica_invariance import OWN_ROWS, is_exchanged
from tfdp.tracing.ways import Ways

__all__ = ["are_of_sums_alone"]


def are_of_sums_alone(values: Sequence[Any], batch: set[Any]) -> list[bool]:
    """Which values, of a graph, are made of rows by exchanges of replicas only.

    Args:
      values: tensors, or slices.
      batch: the keys of the tensors that the replica was given.
    """

    def is_batch(tensor: tf.Tensor) -> bool:
        is_own = tensor.op.name.split("/")[-1].startswith(OWN_ROWS)
        return is_own or key_of(tensor) in batch

    def is_end(tensor: tf.Tensor) -> bool:
        # How many rows there are says nothing of them.
        is_shape = tensor.op.type in SHAPES
        return is_batch(tensor) or is_exchanged(tensor) or is_shape

    parts = [tf.nest.flatten(value, expand_composites=True) for value in values]
    ways = Ways(itertools.chain(*parts), is_end, is_argument=is_batch)
    of_rows, of_sums = ways.from_those(is_batch), ways.from_those(is_exchanged)
    keys = [set(map(ways.key, each)) for each in parts]
    return [
        not each & (of_rows | ways.outside) and bool(each & of_sums) for each in keys
    ]
