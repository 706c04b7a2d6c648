"""Counts each replica's rows in the arguments of `strategy.run`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp._private.names import PerReplica
from tfdp.errors import ScopeError
from tfdp.tracing.run import ReplicaRun


def sample_counts(arguments: Any, replicas: int) -> ReplicaRun:
    """A `ReplicaRun` with the samples of each replica in `arguments`: the first axis of
    the first tensor that differs between replicas."""
    run, leaves = ReplicaRun(replicas), tf.nest.flatten(arguments)
    run.has_tensors = any(map(tf.is_tensor, leaves))
    run.sparse_parts = [
        part
        for leaf in leaves
        for value in (leaf.values if isinstance(leaf, PerReplica) else (leaf,))
        if isinstance(value, (tf.RaggedTensor, tf.SparseTensor))
        for part in tf.nest.flatten(value, expand_composites=True)
    ]
    if replicas == 1:
        # TensorFlow does not wrap the parts of a single replica.
        parts = [one for one in leaves if tf.is_tensor(one) and one.shape.rank]
        if parts:
            run.batches = {0: [part for part in parts if isinstance(part, tf.Tensor)]}
            run.counts = [_rows_of(parts[0])]
            run.total = run.counts[0]
        return run
    for batch in (one.values for one in leaves if isinstance(one, PerReplica)):
        if all(getattr(part.shape, "rank", None) for part in batch):
            break
    else:
        return run
    if len(batch) != replicas:
        raise ScopeError(
            f"This batch has parts for {len(batch)} replicas, the strategy has "
            f"{replicas}: it was distributed by another strategy. Pass the plain "
            "tf.data.Dataset to model.fit, or distribute it with this strategy."
        )
    run.batches = parts_by_replica(arguments, replicas)
    run.counts = [_rows_of(part) for part in batch]
    if all(isinstance(n, int) for n in run.counts):
        run.total = sum(run.counts)
    else:
        run.total = tf.add_n([tf.cast(n, tf.int32) for n in run.counts])
    return run


def parts_by_replica(arguments: Any, replicas: int) -> dict[int, list[tf.Tensor]]:
    """The tensors of nested `arguments`, by replica."""
    # TensorFlow does not wrap the parts of a single replica.
    values = [
        value.values if isinstance(value, PerReplica) else (value,)
        for value in tf.nest.flatten(arguments)
        if isinstance(value, PerReplica) or replicas == 1
    ]
    return {
        rank: [
            part
            for value in values
            # The inner values of ragged and sparse tensors have other rows.
            for part in tf.nest.flatten(value[rank])
            if isinstance(part, tf.Tensor) and part.shape.rank
        ]
        for rank in range(replicas)
    }


def _rows_of(part: Any) -> Any:
    if isinstance(part, tf.RaggedTensor):
        return tf.cast(part.nrows(), tf.int32)
    if isinstance(part, tf.SparseTensor):
        return tf.cast(part.dense_shape[0], tf.int32)
    return part.shape[0] if part.shape[0] is not None else tf.shape(part)[0]
