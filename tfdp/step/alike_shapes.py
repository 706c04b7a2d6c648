"""One static shape for the parts of a batch, whatever rows each replica has.

Where shapes are known while a step is traced, replicas may have other numbers of rows:
five on three replicas are 2, 2 and 1. What Keras and TensorFlow build of a part may
then differ in its operations (one row is broadcast), and with them the order in which
the gradients of branches come. Exchanges that belong to gradients - shards of weights,
synchronized batch normalization, a layer's own `all_reduce` - meet by their order: they
would add what does not belong together, silently where shapes are equal. So replicas
that differ in their rows are traced as if nobody knew them. How many there are stays
known to what weighs losses (`ReplicaRun.counts`).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp._private.names import PerReplica
from tfdp.tracing.run import ReplicaRun, parts_by_replica

__all__ = ["with_alike_shapes"]


def with_alike_shapes(arguments: Any, run: ReplicaRun) -> Any:
    """`arguments`, in cross-replica context, with the same static shapes on all.

    Args:
      arguments: nested per-replica values.
      run: to note in what the replicas get.
    """
    if tf.executing_eagerly() or run.counts is None or len(run.counts) == 1:
        return arguments
    relaxed = tf.nest.map_structure(_alike, arguments, expand_composites=False)
    run.batches = parts_by_replica(relaxed, len(run.counts))
    return relaxed


def _alike(value: Any) -> Any:
    if not isinstance(value, PerReplica):
        return value
    parts = value.values
    if not all(isinstance(part, tf.Tensor) and part.shape.rank for part in parts):
        return value
    if len({tuple(part.shape) for part in parts}) == 1:
        return value
    if len({part.shape.rank for part in parts}) != 1:
        return value
    axes = zip(*(part.shape for part in parts), strict=True)
    shape = [size if {size} == {*others} else None for size, *others in axes]
    return PerReplica([_of_shape(part, shape) for part in parts])


def _of_shape(part: tf.Tensor, shape: list[int | None]) -> tf.Tensor:
    with tf.device(part.device):
        # The one operation that forgets a shape.
        return tf.raw_ops.PlaceholderWithDefault(input=part, shape=shape)
