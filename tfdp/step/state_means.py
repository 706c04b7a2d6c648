"""Moving statistics that each replica updated on its own: their mean over all samples.

Each replica adds its share, and stores the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.names import own_copy
from tfdp.tracing.eager_order import sum_in_words
from tfdp.tracing.run import ReplicaRun

__all__ = [
    "bring_together",
    "bring_layers_together",
    "store_state",
    "weighted_state",
]


def bring_layers_together(run: ReplicaRun, rank: Any) -> None:
    """Before gradients are accumulated: what layers store of this batch is theirs now.

    It would travel with the gradients, once for all batches of an accumulation, and
    each replica would weigh as its rows of the last one; and what is evaluated before
    would be by each replica's own.

    Cost: one exchange of what layers have stored.
    """
    if run.replicas > 1 and not run.is_local:
        bring_together(run.take_local_state(rank), run, rank)


def bring_together(state: Sequence[Any], run: ReplicaRun, rank: Any) -> None:
    """Leaves the mean over all samples in every replica's copy, by an exchange."""
    if not state:
        return
    shares = weighted_state(state, run, rank)
    if tf.executing_eagerly():
        run.eager_order.meet(rank, sum_in_words(shares))
        context = tf.distribute.get_replica_context()
        means = context.all_reduce(tf.distribute.ReduceOp.SUM, shares)
    else:
        reducer = tf.distribute.get_strategy().extended.reducer
        means = reducer.all_reduce(shares, rank, mean=False)
    store_state(state, means, run, rank)


def weighted_state(state: Sequence[Any], run: ReplicaRun, rank: Any) -> list[tf.Tensor]:
    """This replica's shares of means over samples; nothing when it has no sample.

    Args:
      state: variables that it updated on its own.
      run: in which it is traced.
      rank: the calling replica.
    """
    return [_weighted(variable, run, rank) for variable in state]


def store_state(
    state: Sequence[Any], means: Sequence[tf.Tensor], run: ReplicaRun, rank: Any
) -> None:
    """Stores the means in the calling replica's copies.

    In this replica, and not by `assign`, which would reduce once more.
    """

    for variable, value in zip(state, means, strict=True):
        extended = variable.distribute_strategy.extended
        extended.update_own_copy(variable, lambda own, v: own.assign(v), value)


def _weighted(variable: Any, run: ReplicaRun, rank: Any) -> tf.Tensor:
    share = tf.cast(run.share_of(rank), variable.dtype)
    value = own_copy(variable, rank).read_value()
    # Statistics of no sample are not a number, and 0 times that is not 0.
    return tf.where(share > 0, value * share, tf.zeros_like(value))
