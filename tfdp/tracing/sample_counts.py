"""How many rows each replica was given, read from the arguments of `strategy.run`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp._private.names import PerReplica
from tfdp.errors import ScopeError
from tfdp.tracing.run import ReplicaRun


def sample_counts(arguments: Any, replicas: int) -> ReplicaRun:
    """A `ReplicaRun` with the samples that each replica finds in `arguments`.

    All tensors of a batch have the samples as their first axis; the first one that
    differs between replicas tells.
    """
    run = ReplicaRun(replicas)
    run.has_tensors = any(map(tf.is_tensor, tf.nest.flatten(arguments)))
    if replicas == 1:
        # TensorFlow does not wrap the parts of a single replica.
        parts = [
            value
            for value in tf.nest.flatten(arguments)
            if tf.is_tensor(value) and value.shape.rank
        ]
        if parts:
            run.batches = {0: [part for part in parts if isinstance(part, tf.Tensor)]}
            run.counts = [_rows_of(parts[0])]
            run.total = run.counts[0]
        return run
    batch = next(
        (
            value
            for value in tf.nest.flatten(arguments)
            if isinstance(value, PerReplica)
            and all(getattr(part.shape, "rank", None) for part in value.values)
        ),
        None,
    )
    if batch is not None and len(batch.values) != replicas:
        raise ScopeError(
            f"This batch has parts for {len(batch.values)} replicas, the strategy has "
            f"{replicas}: it was distributed by another strategy. Pass the plain "
            "tf.data.Dataset to model.fit, or distribute it with this strategy."
        )
    if batch is not None:
        run.batches = parts_by_replica(arguments, replicas)
        run.counts = [_rows_of(part) for part in batch.values]
        if all(isinstance(n, int) for n in run.counts):
            run.total = sum(run.counts)
        else:
            run.total = tf.add_n([tf.cast(n, tf.int32) for n in run.counts])
    return run


def parts_by_replica(arguments: Any, replicas: int) -> dict[int, list[tf.Tensor]]:
    """The tensors in nested `arguments` that each replica gets, by replica."""
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
            # Of ragged and sparse tensors the inner values have other rows.
            for part in tf.nest.flatten(value[rank])
            if isinstance(part, tf.Tensor) and part.shape.rank
        ]
        for rank in range(replicas)
    }


def _rows_of(part: Any) -> Any:
    """The length of the first axis: an integer when known, else an int32 scalar."""
    if isinstance(part, tf.RaggedTensor):
        return tf.cast(part.nrows(), tf.int32)
    if isinstance(part, tf.SparseTensor):
        return tf.cast(part.dense_shape[0], tf.int32)
    return part.shape[0] if part.shape[0] is not None else tf.shape(part)[0]
