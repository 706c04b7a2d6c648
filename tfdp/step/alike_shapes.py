"""One static shape for the parts of a batch, whatever rows each replica has.

Where shapes are known while a step is traced, replicas may have other numbers of rows:
five on three replicas are 2, 2 and 1. What Keras and TensorFlow build of a part may
then differ in its operations (one row is broadcast), and with them the order in which
the gradients of branches come. Exchanges that belong to gradients - shards of weights,
synchronized batch normalization, a layer's own `all_reduce` - meet by their order: they
would add what does not belong together, silently where shapes are equal. So replicas
that differ in their rows are traced as if nobody knew them. How many there are stays
known to what weighs losses (`ReplicaRun.counts`).

A host does not know the rows of others while it traces, and what is known of shapes
also decides what has to be asked of all hosts. So with several hosts no rows are known,
as in most of Keras' batches. What else might move the sums of shards is an error:
between hosts each is named by the read of the weight that it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.names import PerReplica
from tfdp.tracing.run import ReplicaRun
from tfdp.tracing.sample_counts import parts_by_replica

__all__ = ["with_alike_shapes"]


def with_alike_shapes(arguments: Any, run: ReplicaRun) -> Any:
    """`arguments`, in cross-replica context, with the same static shapes on all.

    Args:
      arguments: nested per-replica values.
      run: to note in what the replicas get.
    """
    if tf.executing_eagerly() or run.counts is None:
        return arguments
    may_differ = run.spans_hosts and not run.hosts_are_alike
    if len(run.counts) == 1 and not may_differ:
        return arguments
    # Who has no row has borrowed one.
    known = [max(n, 1) if isinstance(n, int) else None for n in run.counts]
    forgotten = known if may_differ else []

    def alike(value: Any) -> Any:
        parts = value.values if isinstance(value, PerReplica) else [value]
        if len(parts) != len(known):
            return value
        shape = _shape_of_all(parts, forgotten)
        if shape is None:
            return value
        relaxed = [_of_shape(part, shape) for part in parts]
        return PerReplica(relaxed) if isinstance(value, PerReplica) else relaxed[0]

    relaxed = tf.nest.map_structure(alike, arguments, expand_composites=False)
    run.batches = parts_by_replica(relaxed, len(run.counts))
    return relaxed


def _shape_of_all(
    parts: Sequence[Any], forgotten: Sequence[int | None]
) -> list[int | None] | None:
    """The static shape that all parts are to have; None: that which they have."""
    if not all(isinstance(part, tf.Tensor) and part.shape.rank for part in parts):
        return None
    if len({part.shape.rank for part in parts}) != 1:
        return None
    axes = zip(*(part.shape for part in parts), strict=True)
    shape = [sizes[0] if len({*sizes}) == 1 else None for sizes in axes]
    if [part.shape[0] for part in parts] == [*forgotten]:
        shape[0] = None
    return None if all(shape == list(part.shape) for part in parts) else shape


def _of_shape(part: tf.Tensor, shape: list[int | None]) -> tf.Tensor:
    with tf.device(part.device):
        # The one operation that forgets a shape.
        return tf.raw_ops.PlaceholderWithDefault(input=part, shape=shape)
