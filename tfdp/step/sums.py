"""The sums of gradients over the replicas, with the small values that ride along."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.names import current_rank, graphs_inside, is_branch_graph
from tfdp.errors import ConfigurationError
from tfdp.exchange.reducer import Reducer
from tfdp.exchange.sparse import merge_rows
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
from tfdp.tracing.assigned_terms import handles_of, passed_on
from tfdp.tracing.loss_shares import ancestors, goes_into, key_of
from tfdp.tracing.loss_suspicions import suspect_gradients
from tfdp.tracing.replica_invariance import is_exchanged, outermost
from tfdp.tracing.run import ReplicaRun, current_run, trace_of
from tfdp.tracing.trace_order import sum_in_words

# The kinds of variables whose gradients have the variable's shape.
WHOLE_GRADIENTS = (None, ShardUpdatedVariable)


def reduce_gradients(
    gradients: Sequence[Any],
    run: ReplicaRun,
    variables: Sequence[Any],
    optimizer: keras.optimizers.Optimizer,
) -> list[Any]:
    """The sum of the gradients over the replicas, with the replicas' own state.

    Of a variable that is updated by shards each replica gets its shard of the sum.
    The gradient of a variable that is stored in shards is one already.

    Moving statistics that each replica updated on its own ride in the same buckets:
    no launch of their own. They come back as the mean over all samples.
    """
    # No gradients, no exchange: replicas trace alike, so all of them come here.
    if not gradients:
        return []
    kinds = [shard_kind(variable) for variable in variables]
    gradients = [
        gradient if kind not in WHOLE_GRADIENTS else _in_shape(gradient, variable)
        for gradient, variable, kind in zip(gradients, variables, kinds, strict=True)
    ]
    results = list(gradients)
    scattered = [i for i, kind in enumerate(kinds) if kind is ShardUpdatedVariable]
    if scattered:
        shards = tf.distribute.get_strategy().extended.shards
        sent = [gradients[i] for i in scattered]
        own = shards.scatter(sent, [variables[i] for i in scattered])
        for place, shard in zip(scattered, own, strict=True):
            results[place] = shard
    # What is stored in shards was reduced when the layer's read was differentiated.
    whole = [i for i, kind in enumerate(kinds) if kind is None]
    rank = current_rank()
    in_shards = [i for i, kind in enumerate(kinds) if kind not in WHOLE_GRADIENTS]
    refuse_own_scaling(run, rank, [gradients[i] for i in in_shards])
    suspect_gradients(run, rank, [gradients[i] for i in whole], optimizer)
    state = run.take_local_state(rank)
    if run.is_of_one:
        state = []  # what the replica holds is the mean already
    elif not tf.executing_eagerly():
        # What a step has accumulated itself is a part of a sum, and no mean over rows.
        run.own_sums |= passed_on(gradients, handles_of(state, rank))
        state = [variable for variable in state if id(variable) not in run.own_sums]
        state = _stored_in_this_branch(state, run, rank)
    shares = weighted_state(state, run, rank)
    # Optimizers of a model may update different variables.
    probes = [probe for probe in run.probes if probe.is_about(variables)]
    for probe in probes:
        shares += probe.before(gradients, run, rank)
    if whole or shares:
        totals, means = _sum_gradients(
            [gradients[i] for i in whole],
            shares,
            rank,
            [variables[i] for i in whole],
            optimizer,
        )
        for place, value in zip(whole, totals, strict=True):
            is_rows = isinstance(value, tf.IndexedSlices) and not run.is_of_one
            if is_rows and has_rows_once(gradients[place]):
                value = merge_rows(value)
            results[place] = value
        for probe in reversed(probes):
            remember(optimizer, variables, probe.notes_of(rank))
            probe.after(totals, means.pop(), run, rank)
        # Assigned in this replica and not by `assign`, which would reduce once more.
        store_state(state, means, run, rank)
    return results


def _stored_in_this_branch(
    state: Sequence[Any], run: ReplicaRun, rank: Any
) -> list[Any]:
    """`state` but for what is stored in each step, where not each has an update.

    A program that accumulates gradients updates in a branch of each k-th step. What its
    other steps store would be weighed by the rows of the last one; it is brought
    together at the end of each.
    """
    if not run.ends_with_late_state:
        return list(state)
    around = graphs_inside(None)
    outside = {
        one
        for one, graph in run.stored_graphs(rank).items()
        # Not of a function that was called: what is around that, such as a loop of
        # steps and its conditionals, is around the update as well.
        if any(each is graph for each in around)
        and any(map(is_branch_graph, graphs_inside(graph)))
    }
    run.leave_local_state(rank, (one for one in state if id(one) in outside))
    return [variable for variable in state if id(variable) not in outside]


def _sum_gradients(
    gradients: Sequence[Any],
    state: Sequence[tf.Tensor],
    rank: Any,
    variables: Sequence[Any],
    optimizer: keras.optimizers.Optimizer,
) -> tuple[list[Any], list[tf.Tensor]]:
    reducer, found = _reducer(), current_run()
    if found is not None and found[0].is_local:
        raise ConfigurationError(
            f"The optimizer {optimizer.name!r} has no sync=..., and another one of "
            "this model has: in such a step each replica's loss is the mean over its "
            "own rows. Give all optimizers of a model a sync, or none."
        )
    if reducer is not None:
        if found is not None:  # an optimizer that nobody leads has not left them out
            run, rank = found
            gradients = run.parts_to_sum(rank, list(gradients))
            state = run.parts_to_sum(rank, list(state))
        plain_sums = functools.partial(
            reducer.sum_gradients, rank=rank, sum_rows=sums_repeated_rows(optimizer)
        )
        asked = momentum_compression_of(optimizer)
        if asked is not None:
            return sum_by_momentum(
                asked,
                reducer,
                gradients,
                state,
                rank,
                variables,
                optimizer,
                plain_sums,
                scale_when_summed(optimizer),
            )
        if reducer.compressed is None:
            return plain_sums(gradients, state)
        refuse_momentum(reducer.compressed, optimizer)
        return sum_compressed(
            reducer.compressed,
            gradients,
            state,
            rank,
            variables,
            optimizer,
            plain_sums,
            scale_when_summed(optimizer),
        )
    refuse_eager_compression(optimizer)
    if found is not None:
        run, rank = found
        run.eager_order.meet(rank, sum_in_words([*gradients, *state]))
    context = tf.distribute.get_replica_context()
    sums = context.all_reduce(tf.distribute.ReduceOp.SUM, [*gradients, *state])
    return as_requested(sums[: len(gradients)]), sums[len(gradients) :]


def _reducer() -> Reducer | None:
    """The calling replica's; None: it is eager, or a stock strategy's."""
    if tf.executing_eagerly():
        return None
    return getattr(tf.distribute.get_strategy().extended, "reducer", None)


def _in_shape(gradient: Any, variable: Any) -> Any:
    """The gradient, with its variable's shape where that was lost on the way.

    What a replica compiles (`jit_compile=True`) may come back without a shape, on one
    replica and not on another, and buckets are cut by the shapes.
    """
    if isinstance(gradient, tf.Tensor) and gradient.shape.num_elements() is None:
        gradient.set_shape(variable.shape)  # which is no operation of the step
    return gradient


def agree_finite(
    optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any]
) -> tf.Tensor:
    """Whether the gradients are finite on every replica; the same answer on each."""
    # A count of replicas that say no, because a sum is exact and needs no other op.
    mine = type(optimizer).check_finite(optimizer, gradients)
    bad = tf.cast(tf.logical_not(mine), tf.float32)
    _, [total] = _sum_gradients([], [bad], current_rank(), [], optimizer)
    return total == 0.0


def largest_of_replicas(
    values: Sequence[tf.Tensor],
    run: ReplicaRun,
    optimizer: keras.optimizers.Optimizer,
) -> list[tf.Tensor]:
    """Element by element the largest of what all replicas have; nothing is below 0.

    Args:
      values: vectors of known length.
      run: of the calling replica.
      optimizer: which it is for.
    """
    lengths = [value.shape[0] for value in values]
    mine = tf.concat([tf.cast(value, tf.float32) for value in values], axis=0)
    rank = tf.distribute.get_replica_context().replica_id_in_sync_group
    # A sum to which each brings a row of its own: no engine takes a maximum. Not by a
    # product with zeros, which is not 0 of what is infinite.
    own = tf.equal(tf.range(run.replicas), rank)[:, None]
    rows = tf.where(own, mine[None], tf.zeros_like(mine)[None])
    _, [all_rows] = _sum_gradients([], [rows], current_rank(), [], optimizer)
    parts = tf.split(tf.reduce_max(all_rows, axis=0), lengths)
    return [tf.cast(p, value.dtype) for p, value in zip(parts, values, strict=True)]


# Gradients of weights that are stored in shards, which are no wholes to a step.
#
# In a replica such a gradient is that replica's part of the sum over all replicas. A
# step that adds it up once more would add different weights, and one that scales it by
# a norm of its part would scale each part by another number.


ELEMENTWISE = {
    *("AddN", "AddV2", "Cast", "ClipByValue", "EnsureShape", "Identity", "IdentityN"),
    *("Maximum", "Minimum", "Mul", "Neg", "RealDiv", "SelectV2", "Sub"),
}
REDUCTIONS = {
    *("All", "Any", "EuclideanNorm", "L2Loss", "Max", "Mean", "Min", "Prod", "Sum"),
}
WHAT_IT_IS = (
    'With shard="parameters" the gradient of a weight that is stored in shards is, in '
    "each replica, that replica's part of the sum over all replicas"
)
WHAT_TO_DO = (
    "For a norm over all weights take the all_reduce of the sum of the parts' squares; "
    "or ask the optimizer (clipnorm, global_clipnorm), or train with "
    'shard="gradients", where gradients are whole.'
)


def is_made_of_shards(run: ReplicaRun, rank: Any, value: Any) -> bool:
    """Whether `value`, in a graph, is made of such gradients by no exchange.

    Then it is not of the replica's own rows, which it may not have.
    """
    shards = run.shard_gradients[trace_of(rank)]
    is_of_graph = isinstance(value, tf.Tensor) and not tf.executing_eagerly()
    return bool(shards) and is_of_graph and _is_among(shards, _behind(value, shards))


def refuse_sum_of_shards(run: ReplicaRun, rank: Any, values: Any) -> None:
    """Refuses an `all_reduce` that a program takes of such gradients.

    Raises:
      ConfigurationError: naming what may be summed.
    """
    shards = run.shard_gradients[trace_of(rank)]
    if not shards:
        return
    for value in tf.nest.flatten(values, expand_composites=True):
        if tf.is_tensor(value) and _is_among(shards, _terms(value, shards)):
            raise ConfigurationError(
                f"{WHAT_IT_IS} already: an all_reduce would add parts of different "
                f"weights. Leave it out. {WHAT_TO_DO}"
            )


def refuse_own_scaling(run: ReplicaRun, rank: Any, gradients: Iterable[Any]) -> None:
    """Refuses gradients that were scaled by what one replica's parts say.

    Args:
      run: in which they are traced.
      rank: the calling replica.
      gradients: of weights that are stored in shards, as an optimizer gets them.

    Raises:
      ConfigurationError: naming what to scale by.
    """
    shards = run.shard_gradients[trace_of(rank)]
    for gradient in gradients:
        for term in _terms(gradient, shards):
            if _is_of_a_part(term, shards):
                raise ConfigurationError(
                    f"{WHAT_IT_IS}, and here it is scaled by a number that is made of "
                    f"one replica's parts. {WHAT_TO_DO}"
                )


def _terms(value: Any, shards: Collection[Any]) -> Iterator[tf.Tensor]:
    """What `value` is element by element made of, down to `shards`, and they."""
    todo, seen = [value], set()
    while todo:
        given = todo.pop()
        tensor = given if key_of(given) in shards else outermost(given)
        if tensor is None or key_of(tensor) in seen:
            continue
        seen.add(key_of(tensor))
        is_eager = isinstance(tensor, tf.__internal__.EagerTensor)
        is_made_so = not is_eager and tensor.op.type in ELEMENTWISE
        if key_of(tensor) in shards or not is_made_so or is_exchanged(tensor):
            yield tensor
        else:
            todo += goes_into(tensor)


def _is_of_a_part(term: tf.Tensor, shards: Collection[Any]) -> bool:
    """Whether `term` is made, by no exchange, of a norm of `shards` or its like."""
    if key_of(term) in shards or isinstance(term, tf.__internal__.EagerTensor):
        return False
    return any(
        tensor.op.type in REDUCTIONS and _is_among(shards, _behind(tensor, shards))
        for tensor in _behind(term, shards)
    )


def _behind(term: tf.Tensor, shards: Collection[Any]) -> Iterator[tf.Tensor]:
    """All that `term` is made of by no exchange but that which makes `shards`."""
    return ancestors(
        term,
        is_behind=lambda tensor: key_of(tensor) not in shards and is_exchanged(tensor),
    )


def _is_among(shards: Collection[Any], terms: Iterable[tf.Tensor]) -> bool:
    return any(key_of(term) in shards for term in terms)
