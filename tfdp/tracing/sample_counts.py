"""Counts each replica's rows in the arguments of `strategy.run`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.names import PerReplica
from tfdp.errors import ScopeError
from tfdp.tracing.run import Batch, Step


def step_of(arguments: Any, replicas: int) -> Step:
    """A `Step` with the samples of each replica in `arguments`: the first axis of the
    first tensor that differs between replicas."""
    leaves = tf.nest.flatten(arguments)
    sparse = tuple(
        part
        for leaf in leaves
        for value in (leaf.values if isinstance(leaf, PerReplica) else (leaf,))
        if isinstance(value, (tf.RaggedTensor, tf.SparseTensor))
        for part in tf.nest.flatten(value, expand_composites=True)
    )
    batch = Batch(has_tensors=any(map(tf.is_tensor, leaves)), sparse_parts=sparse)
    parts = _counted_parts(leaves, replicas)
    if not parts:
        return Step(replicas, batch)
    counts = tuple(map(_rows_of, parts))
    step = Step(replicas, dataclasses.replace(batch, counts=counts, total=_sum(counts)))
    step.take_parts(parts_by_replica(arguments, replicas))
    return step


def _counted_parts(leaves: Sequence[Any], replicas: int) -> Sequence[Any]:
    """The part of each replica of which the rows count; none: there is no batch."""
    if replicas == 1:
        # TensorFlow does not wrap the parts of a single replica.
        parts = [one for one in leaves if tf.is_tensor(one) and one.shape.rank]
        return parts[:1]
    for batch in (one.values for one in leaves if isinstance(one, PerReplica)):
        if all(getattr(part.shape, "rank", None) for part in batch):
            break
    else:
        return []
    if len(batch) != replicas:
        raise ScopeError(
            f"This batch has parts for {len(batch)} replicas, the strategy has "
            f"{replicas}: it was distributed by another strategy. Pass the plain "
            "tf.data.Dataset to model.fit, or distribute it with this strategy."
        )
    return list(batch)


def _sum(counts: Sequence[Any]) -> Any:
    if len(counts) == 1:
        return counts[0]
    if all(isinstance(n, int) for n in counts):
        return sum(counts)
    return tf.add_n([tf.cast(n, tf.int32) for n in counts])


def parts_by_replica(arguments: Any, replicas: int) -> list[list[tf.Tensor]]:
    """The tensors of nested `arguments`, by replica."""
    # TensorFlow does not wrap the parts of a single replica.
    values = [
        value.values if isinstance(value, PerReplica) else (value,)
        for value in tf.nest.flatten(arguments)
        if isinstance(value, PerReplica) or replicas == 1
    ]
    return [
        [
            part
            for value in values
            # The inner values of ragged and sparse tensors have other rows.
            for part in tf.nest.flatten(value[rank])
            if isinstance(part, tf.Tensor) and part.shape.rank
        ]
        for rank in range(replicas)
    ]


def _rows_of(part: Any) -> Any:
    if isinstance(part, tf.RaggedTensor):
        return tf.cast(part.nrows(), tf.int32)
    if isinstance(part, tf.SparseTensor):
        return tf.cast(part.dense_shape[0], tf.int32)
    return part.shape[0] if part.shape[0] is not None else tf.shape(part)[0]
