"""Gradients of variables that are stored, or updated, in shards."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.chain.reduction import Reduction, Stage
from tfdp.errors import ConfigurationError
from tfdp.lint.registry import is_of_graph, key_of
from tfdp.lint.values import Term
from tfdp.sharding.updates import ShardTrace, ShardUpdates
from tfdp.tracing.step import Step
from tfdp.variables.in_shards import is_in_shards, is_shard_of_sum

WHAT_IT_IS = (
    'With shard="parameters" or layout= the gradient of a weight that is stored in '
    "shards is, in each replica, that replica's part of the sum over all replicas"
)
WHAT_TO_DO = (
    "For a norm over all weights take the all_reduce of the sum of the parts' squares; "
    "or use the optimizer's (clipnorm, global_clipnorm), or train with "
    'shard="gradients", where gradients are whole.'
)


class _GivenShards(list[tuple[Any, Any]]):
    """Gradients of weights that are stored in shards, with their ranks."""


def refuse_scaled_shards(step: Step) -> None:
    """Refuses gradients of such weights that were scaled by one replica's parts."""
    for rank, gradient in step.of(_GivenShards):
        if not is_of_graph(gradient):
            continue
        if Term.SHARD_NUMBER in step.analysis(rank).value(gradient).terms:
            raise ConfigurationError(
                f"{WHAT_IT_IS}, and here it is scaled by a number computed from "
                f"one replica's parts, or by entries that are not cut as it is. "
                f"{WHAT_TO_DO}"
            )


class Shards(Stage):
    """Takes the gradients of sharded variables out of the exchange.

    Each replica gets its shard of the sum: of a weight that is updated by shards here,
    of one that is stored in shards in the backward pass, if a tape computed it.
    """

    def __init__(self, shards: ShardUpdates):
        self._shards = shards
        self._sums: dict[int, Any] = {}

    def before(self, reduction: Reduction) -> None:
        step, rank = reduction.step, reduction.rank
        scattered: list[int] = []
        reduced: list[int] = []
        for place, variable in enumerate(reduction.variables):
            gradient = reduction.gradients[place]
            if gradient is not None and is_in_shards(variable):
                is_sum = is_shard_of_sum(variable, rank, gradient)
                (reduced if is_sum else scattered).append(place)
        if scattered:
            sent = [reduction.take(place) for place in scattered]
            targets = [reduction.variables[place] for place in scattered]
            own = self._shards.scatter(sent, targets)
            self._sums = dict(zip(scattered, own, strict=True))
        for place in reduced:
            shard = self._sums[place] = reduction.take(place)
            step.of(_GivenShards).append((rank, shard))

    def after(self, reduction: Reduction) -> None:
        for place, shard in self._sums.items():
            reduction.gradients[place] = shard


def depends_on_shards(step: Step, rank: Any, value: Any) -> bool:
    """Whether `value`, in a graph, depends on gradients of sharded weights, and so not
    on the replica's own rows; exchanges excluded."""
    if not step.trace(rank).of(ShardTrace).gradients or not is_of_graph(value):
        return False
    return bool(
        step.analysis(rank).value(value).terms & {Term.SHARD, Term.SHARD_NUMBER}
    )


def refuse_sum_of_shards(step: Step, rank: Any, values: Any) -> None:
    """Refuses an `all_reduce` of gradients of sharded weights, which are reduced."""
    shards = step.trace(rank).of(ShardTrace).gradients
    if not shards:
        return
    for value in tf.nest.flatten(values, expand_composites=True):
        is_part = tf.is_tensor(value) and key_of(value) in shards
        if is_of_graph(value):
            is_part = Term.SHARD in step.analysis(rank).value(value).terms
        if is_part:
            raise ConfigurationError(
                f"{WHAT_IT_IS} already: an all_reduce would add parts of different "
                f"weights. Leave it out. {WHAT_TO_DO}"
            )
