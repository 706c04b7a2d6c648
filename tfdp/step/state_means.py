"""Moving statistics that each replica updated on its own: their mean over all samples.

Each replica adds its share, and stores the sum. Replicas that share the forward pass
share the few operations for each of them as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.names import own_copy
from tfdp.step.shared_functions import SharedFunctions
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

    def shares() -> list[tf.Tensor]:
        return [_weighted(variable, run, rank) for variable in state]

    if not run.gradients_at_once or not state:
        return shares()
    count = run.count_of(rank)
    own = [count] if isinstance(count, tf.Tensor) else []
    found = SharedFunctions.of(run).results_of(
        "shares",
        rank,
        shares,
        own,
        _device_of(rank),
        common=run.common_tensors,
        is_known=_always,
    )
    return shares() if found is None else list(found)


def store_state(
    state: Sequence[Any], means: Sequence[tf.Tensor], run: ReplicaRun, rank: Any
) -> None:
    """Stores the means in the calling replica's copies.

    In this replica, and not by `assign`, which would reduce once more.
    """

    def store(values: Sequence[tf.Tensor]) -> None:
        for variable, value in zip(state, values, strict=True):
            extended = variable.distribute_strategy.extended
            extended.update_own_copy(variable, lambda own, v: own.assign(v), value)

    if run.gradients_at_once and state:
        of_rank = rank, store, list(means), _device_of(rank)
        SharedFunctions.of(run).call("means", *of_rank, is_known=_always)
    else:
        store(means)


def _always() -> bool:
    return True  # what runs stands in this file


def _weighted(variable: Any, run: ReplicaRun, rank: Any) -> tf.Tensor:
    share = tf.cast(run.share_of(rank), variable.dtype)
    value = own_copy(variable, rank).read_value()
    # Statistics of no sample are not a number, and 0 times that is not 0.
    return tf.where(share > 0, value * share, tf.zeros_like(value))


def _device_of(rank: int) -> str:
    return str(tf.distribute.get_strategy().extended.worker_devices[rank])
