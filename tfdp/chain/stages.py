"""Sums gradients through the stages that the features of this step give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from keras.optimizers import Optimizer

from tfdp.chain.reduction import GradientReducer, Reduction, Stage, reduce
from tfdp.errors import ConfigurationError
from tfdp.tracing.step import Step
from tfdp.variables.in_shards import is_stored_in_shards


def reduce_gradients(
    gradients: Sequence[Any],
    step: Step,
    rank: Any,
    variables: Sequence[Any],
    optimizer: Optimizer,
) -> list[Any]:
    """The sum of the gradients over the replicas; also synchronizes buffers.

    For a variable that is updated by shards each replica gets its shard of the sum; the
    gradient of a variable that is stored in shards is one already.
    """
    # No gradients, no exchange: replicas trace the same, so all of them return here.
    if not gradients:
        return []
    for gradient, variable in zip(gradients, variables, strict=True):
        # XLA may lose shapes on some replicas, and buckets are cut by the shapes.
        is_dense = isinstance(gradient, tf.Tensor)
        if is_dense and gradient.shape.num_elements() is None:
            if not is_stored_in_shards(variable):  # else it has a shard's shape
                gradient.set_shape(variable.shape)  # adds no op
    reduction = Reduction(list(gradients), variables, step, rank, optimizer)
    chain = chain_of(reduction)
    return reduce(reduction, chain, reducer_for(step, optimizer))


def chain_of(reduction: Reduction) -> list[Stage]:
    """The stages of a reduction, the outermost first."""
    features = reduction.step.features
    return [stage for feature in features for stage in feature.stages(reduction)]


def reducer_for(step: Step, optimizer: Optimizer) -> GradientReducer:
    """The reducer that sums for all replicas; refuses steps of local training."""
    if step.is_local:
        raise ConfigurationError(
            f"The optimizer {optimizer.name!r} has no sync=..., and another one of "
            "this model has: in such a step each replica's loss is the mean over its "
            "own rows. Give all optimizers of a model a sync, or none."
        )
    reducer: GradientReducer = tf.distribute.get_strategy().extended.reducer
    return reducer


def sum_exactly(
    values: Sequence[tf.Tensor], step: Step, rank: Any, optimizer: Optimizer
) -> list[tf.Tensor]:
    """The sums of small values over the replicas."""
    reducer = reducer_for(step, optimizer)
    _, sums = reducer.sum_gradients([], values, rank)
    return sums


def agree_finite(
    optimizer: Optimizer, gradients: Sequence[Any], step: Step, rank: Any
) -> tf.Tensor:
    """Whether the gradients are finite on every replica; equal on all of them."""
    # Sums the number of replicas with others: exact, and needs no other op.
    mine = type(optimizer).check_finite(optimizer, gradients)
    bad = tf.cast(tf.logical_not(mine), tf.float32)
    [total] = sum_exactly([bad], step, rank, optimizer)
    return total == 0.0


def largest_of_replicas(
    values: Sequence[tf.Tensor], step: Step, rank: Any, optimizer: Optimizer
) -> list[tf.Tensor]:
    """The elementwise maximum over replicas of vectors of static length; at least 0."""
    lengths = [value.shape[0] for value in values]
    mine = tf.concat([tf.cast(value, tf.float32) for value in values], axis=0)
    place = tf.distribute.get_replica_context().replica_id_in_sync_group
    # A sum to which each replica adds its own row, because backends have no maximum.
    # `where`, because infinity times 0 is NaN.
    own = tf.equal(tf.range(step.replicas), place)[:, None]
    rows = tf.where(own, mine[None], tf.zeros_like(mine)[None])
    [all_rows] = sum_exactly([rows], step, rank, optimizer)
    parts = tf.split(tf.reduce_max(all_rows, axis=0), lengths)
    return [tf.cast(p, value.dtype) for p, value in zip(parts, values, strict=True)]
