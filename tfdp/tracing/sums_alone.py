"""Whether something is of the rows of all replicas already, told from the graph."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.tracing.loss_shares import key_of
from tfdp.tracing.own_rows import SHAPES
from tfdp.tracing.replica_invariance import (
    GATHERED_ROWS,
    OWN_ROWS,
    is_exchanged,
    is_named,
)
from tfdp.tracing.ways import Ways

__all__ = ["are_of_sums_alone"]


def are_of_sums_alone(
    values: Sequence[Any], batch: set[Any], *, or_of_gathered: bool = False
) -> list[bool]:
    """Which values, of a graph, are made of rows by exchanges of replicas only.

    Args:
      values: tensors, or slices.
      batch: the keys of the tensors that the replica was given.
      or_of_gathered: whether rows of all replicas count as made so, but for those that
        a replica takes of them as its own.
    """

    def is_batch(tensor: tf.Tensor) -> bool:
        is_own = or_of_gathered and is_named(tensor, OWN_ROWS)
        return is_own or key_of(tensor) in batch

    def is_met(tensor: tf.Tensor) -> bool:
        is_gathered = or_of_gathered and is_named(tensor, GATHERED_ROWS)
        return is_gathered or is_exchanged(tensor)

    def is_end(tensor: tf.Tensor) -> bool:
        # How many rows there are says nothing of them.
        return is_batch(tensor) or is_met(tensor) or tensor.op.type in SHAPES

    parts = [tf.nest.flatten(value, expand_composites=True) for value in values]
    ways = Ways(itertools.chain(*parts), is_end, is_argument=is_batch)
    of_rows, of_sums = ways.from_those(is_batch), ways.from_those(is_met)
    keys = [set(map(ways.key, each)) for each in parts]
    return [
        not each & (of_rows | ways.outside) and bool(each & of_sums) for each in keys
    ]
