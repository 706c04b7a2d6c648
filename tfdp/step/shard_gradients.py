"""Gradients of weights that are stored in shards, which are no wholes to a step.

In a replica such a gradient is that replica's part of the sum over all replicas. A step
that adds it up once more would add different weights, and one that scales it by a norm
of its part would scale each part by another number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfdp.errors import ConfigurationError
from tfdp.tracing.loss_shares import ancestors, goes_into, key_of
from tfdp.tracing.replica_invariance import is_exchanged, outermost
from tfdp.tracing.run import ReplicaRun, trace_of

__all__ = ["is_made_of_shards", "refuse_own_scaling", "refuse_sum_of_shards"]

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
