"""Whether a value is made of a replica's own rows, told from the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdp.tracing.loss_shares import ancestors, key_of
from tfdp.tracing.replica_invariance import is_exchanged

__all__ = ["SHAPES", "batch_keys", "is_made_of", "is_of_own_rows"]

#: What an operation makes of the shape of its input, and not of values.
SHAPES = frozenset(("OnesLike", "Shape", "ShapeN", "Size", "ZerosLike"))
#: See `ReplicaRun.batches`.
Batches: TypeAlias = Mapping[int, Sequence[tf.Tensor]]


def batch_keys(batches: Batches, trace: int) -> set[Any]:
    """The keys (`key_of`) of the tensors that the replica of `trace` was given."""
    return {key_of(tensor) for tensor in batches.get(trace, ())}


def is_made_of(value: tf.Tensor, batch: set[Any]) -> bool:
    """Whether a tensor with one of these keys goes into `value`, by no exchange."""

    def is_batch(tensor: tf.Tensor) -> bool:
        return key_of(tensor) in batch

    made_of = ancestors(value, is_found=is_batch, is_behind=is_exchanged)
    return any(map(is_batch, made_of))


def is_of_own_rows(batches: Batches, trace: int, value: tf.Tensor) -> bool:
    """Whether `value` is made of the replica's rows, and not of all replicas' as well.

    What was gathered, or added up where replicas meet, is made of all.
    """
    if not is_made_of(value, batch_keys(batches, trace)):
        return False
    others = [batch_keys(batches, other) for other in batches if other != trace]
    return not others or not all(is_made_of(value, batch) for batch in others)
