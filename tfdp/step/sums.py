"""Sums gradients over the replicas, and small values in the same buckets."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
from keras.optimizers import Optimizer

from tfdp._private.names import current_rank, graphs_inside, is_branch_graph
from tfdp.errors import ConfigurationError
from tfdp.exchange.sparse import merge_rows
from tfdp.lint.registry import is_of_graph, key_of
from tfdp.lint.values import Term
from tfdp.sharding.variables import ShardUpdatedVariable, shard_kind
from tfdp.step.buffer_synchronization import store_state, weighted_state
from tfdp.step.compression import (
    momentum_compression_of,
    refuse_eager_compression,
    refuse_momentum,
    sum_by_momentum,
    sum_compressed,
)
from tfdp.step.guard_notes import remember, scale_when_summed
from tfdp.step.table_rows import as_requested, has_rows_once, sums_repeated_rows
from tfdp.tracing.run import ReplicaRun, current_run
from tfdp.tracing.state_checks import handles_of, linear_sources
from tfdp.tracing.trace_order import describe_sum

# The kinds of variables with gradients of the variable's shape.
WHOLE_GRADIENTS = (None, ShardUpdatedVariable)


def reduce_gradients(
    gradients: Sequence[Any],
    run: ReplicaRun,
    variables: Sequence[Any],
    optimizer: Optimizer,
) -> list[Any]:
    """The sum of the gradients over the replicas; also synchronizes buffers.

    For a variable that is updated by shards each replica gets its shard of the sum; the
    gradient of a variable that is stored in shards is one already. Buffers share the
    buckets, so they need no launch of their own, and become the mean over all samples.
    """
    # No gradients, no exchange: replicas trace the same, so all of them return here.
    if not gradients:
        return []
    kinds = [shard_kind(variable) for variable in variables]
    for gradient, variable, kind in zip(gradients, variables, kinds, strict=True):
        if kind in WHOLE_GRADIENTS and isinstance(gradient, tf.Tensor):
            # XLA may lose shapes on some replicas, and buckets are cut by the shapes.
            if gradient.shape.num_elements() is None:
                gradient.set_shape(variable.shape)  # adds no op
    results = list(gradients)
    scattered = [i for i, kind in enumerate(kinds) if kind is ShardUpdatedVariable]
    if scattered:
        shards = tf.distribute.get_strategy().extended.shards
        sent = [gradients[i] for i in scattered]
        own = shards.scatter(sent, [variables[i] for i in scattered])
        for place, shard in zip(scattered, own, strict=True):
            results[place] = shard
    # Gradients of variables stored in shards were reduced in the backward pass.
    whole = [i for i, kind in enumerate(kinds) if kind is None]
    rank = current_rank()
    in_shards = [i for i, kind in enumerate(kinds) if kind not in WHOLE_GRADIENTS]
    refuse_own_scaling(run, rank, [gradients[i] for i in in_shards])
    state = run.take_local_state(rank)
    if run.is_of_one:
        state = []  # the replica's values are the means already
    elif not tf.executing_eagerly():
        # Gradients that a step has accumulated are parts of a sum, not means over rows.
        handles = handles_of(state, rank)
        run.own_sums |= linear_sources(run, rank, gradients, handles)
        state = [variable for variable in state if id(variable) not in run.own_sums]
        state = _stored_in_this_branch(state, run, rank)
    shares = weighted_state(state, run, rank)
    # Optimizers of a model may update different variables.
    probes = [probe for probe in run.probes if probe.is_about(variables)]
    for probe in probes:
        shares += probe.before(gradients, run, rank)
    if whole or shares:
        sent, targets = [gradients[i] for i in whole], [variables[i] for i in whole]
        totals, means = _sum_gradients(sent, shares, rank, targets, optimizer)
        for place, value in zip(whole, totals, strict=True):
            is_rows = isinstance(value, tf.IndexedSlices) and not run.is_of_one
            if is_rows and has_rows_once(gradients[place]):
                value = merge_rows(value)
            results[place] = value
        for probe in reversed(probes):
            remember(optimizer, variables, probe.notes_of(rank))
            probe.after(totals, means.pop(), run, rank)
        # Not by `assign`, which would reduce again.
        store_state(state, means, run, rank)
    return results


def _stored_in_this_branch(
    state: Sequence[Any], run: ReplicaRun, rank: Any
) -> list[Any]:
    """`state` without what each step stores, if only a branch of each k-th step has an
    update: the state of other steps would be weighted by the rows of the last one."""
    if not run.synchronizes_at_end:
        return list(state)
    around = graphs_inside(None)
    outside = {
        one
        for one, graph in run.stored_graphs(rank).items()
        # A called function does not count: what surrounds it, such as a loop of steps
        # and its conditionals, surrounds the update as well.
        if any(each is graph for each in around)
        and any(map(is_branch_graph, graphs_inside(graph)))
    }
    run.return_local_state(rank, (one for one in state if id(one) in outside))
    return [variable for variable in state if id(variable) not in outside]


def _sum_gradients(
    gradients: Sequence[Any],
    state: Sequence[tf.Tensor],
    rank: Any,
    variables: Sequence[Any],
    optimizer: Optimizer,
) -> tuple[list[Any], list[tf.Tensor]]:
    # None in eager mode, or for a stock strategy.
    extended, found = tf.distribute.get_strategy().extended, current_run()
    reducer = None if tf.executing_eagerly() else getattr(extended, "reducer", None)
    if found is not None and found[0].is_local:
        raise ConfigurationError(
            f"The optimizer {optimizer.name!r} has no sync=..., and another one of "
            "this model has: in such a step each replica's loss is the mean over its "
            "own rows. Give all optimizers of a model a sync, or none."
        )
    if reducer is not None:
        if found is not None:  # else the optimizer has no overrides
            run, rank = found
            gradients = run.parts_to_sum(rank, list(gradients))
            state = run.parts_to_sum(rank, list(state))
        plain_sums = functools.partial(
            reducer.sum_gradients, rank=rank, sum_rows=sums_repeated_rows(optimizer)
        )
        values = gradients, state, rank, variables, optimizer, plain_sums
        by_momentum = momentum_compression_of(optimizer)
        if by_momentum is not None:
            unit = scale_when_summed(optimizer)
            return sum_by_momentum(by_momentum, reducer, *values, unit)
        if reducer.compressed is None:
            return plain_sums(gradients, state)
        refuse_momentum(reducer.compressed, optimizer)
        unit = scale_when_summed(optimizer)
        return sum_compressed(reducer.compressed, *values, unit)
    refuse_eager_compression(optimizer)
    if found is not None:
        run, rank = found
        run.eager_order.meet(rank, describe_sum([*gradients, *state]))
    context = tf.distribute.get_replica_context()
    sums = context.all_reduce(tf.distribute.ReduceOp.SUM, [*gradients, *state])
    return as_requested(sums[: len(gradients)]), sums[len(gradients) :]


def agree_finite(optimizer: Optimizer, gradients: Sequence[Any]) -> tf.Tensor:
    """Whether the gradients are finite on every replica; equal on all of them."""
    # Sums the number of replicas with others: exact, and needs no other op.
    mine = type(optimizer).check_finite(optimizer, gradients)
    bad = tf.cast(tf.logical_not(mine), tf.float32)
    _, [total] = _sum_gradients([], [bad], current_rank(), [], optimizer)
    return total == 0.0


def largest_of_replicas(
    values: Sequence[tf.Tensor], run: ReplicaRun, optimizer: Optimizer
) -> list[tf.Tensor]:
    """The elementwise maximum over replicas of vectors of static length; at least 0."""
    lengths = [value.shape[0] for value in values]
    mine = tf.concat([tf.cast(value, tf.float32) for value in values], axis=0)
    rank = tf.distribute.get_replica_context().replica_id_in_sync_group
    # A sum to which each replica adds its own row, because backends have no maximum.
    # `where`, because infinity times 0 is NaN.
    own = tf.equal(tf.range(run.replicas), rank)[:, None]
    rows = tf.where(own, mine[None], tf.zeros_like(mine)[None])
    _, [all_rows] = _sum_gradients([], [rows], current_rank(), [], optimizer)
    parts = tf.split(tf.reduce_max(all_rows, axis=0), lengths)
    return [tf.cast(p, value.dtype) for p, value in zip(parts, values, strict=True)]


WHAT_IT_IS = (
    'With shard="parameters" the gradient of a weight that is stored in shards is, in '
    "each replica, that replica's part of the sum over all replicas"
)
WHAT_TO_DO = (
    "For a norm over all weights take the all_reduce of the sum of the parts' squares; "
    "or use the optimizer's (clipnorm, global_clipnorm), or train with "
    'shard="gradients", where gradients are whole.'
)


def depends_on_shards(run: ReplicaRun, rank: Any, value: Any) -> bool:
    """Whether `value`, in a graph, depends on gradients of sharded weights, and so not
    on the replica's own rows; exchanges excluded."""
    if not run.trace(rank).shard_gradients or not is_of_graph(value):
        return False
    return bool(run.analysis(rank).value(value).terms & {Term.SHARD, Term.SHARD_NUMBER})


def refuse_sum_of_shards(run: ReplicaRun, rank: Any, values: Any) -> None:
    """Refuses an `all_reduce` of gradients of sharded weights, which are reduced."""
    shards = run.trace(rank).shard_gradients
    if not shards:
        return
    for value in tf.nest.flatten(values, expand_composites=True):
        is_part = tf.is_tensor(value) and key_of(value) in shards
        if is_of_graph(value):
            is_part = Term.SHARD in run.analysis(rank).value(value).terms
        if is_part:
            raise ConfigurationError(
                f"{WHAT_IT_IS} already: an all_reduce would add parts of different "
                f"weights. Leave it out. {WHAT_TO_DO}"
            )


def refuse_own_scaling(run: ReplicaRun, rank: Any, gradients: Iterable[Any]) -> None:
    """Refuses gradients of sharded weights that were scaled by one replica's parts."""
    for gradient in gradients:
        if not is_of_graph(gradient):
            continue
        if Term.SHARD_NUMBER in run.analysis(rank).value(gradient).terms:
            raise ConfigurationError(
                f"{WHAT_IT_IS}, and here it is scaled by a number computed from "
                f"one replica's parts. {WHAT_TO_DO}"
            )
