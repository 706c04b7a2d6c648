"""What happens to the weights when groups of replicas meet (`tfdp.sync`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.exchange.reducer import Reducer
from tfdp.sync.diloco import DiLoCo
from tfdp.sync.rounds import Sync

__all__ = ["mean_over_groups", "outer_update"]


def mean_over_groups(
    values: Sequence[tf.Tensor], reducer: Reducer, rank: Any
) -> list[tf.Tensor]:
    """The plain mean of each value over all groups, on every replica.

    The one place where local weights, or outer gradients, cross. All groups have as
    many replicas, and the replicas of a group the same values, so it is the mean over
    replicas. It counts no rows, as in the papers.

    Cost: 2 n (H - 1) / H bytes on the wire for n bytes on H hosts.
    """
    return reducer.all_reduce(values, rank, mean=True)


def outer_update(
    sync: Sync,
    outer: Sequence[tf.Tensor],
    local: Sequence[tf.Tensor],
    momenta: Sequence[tf.Tensor],
    reducer: Reducer,
    rank: Any,
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The next outer weights w_(t+1), and the next outer momenta.

    Args:
      sync: `LocalSGD`, the mean of the local weights, or `DiLoCo`, whose equations are
        in its docstring.
      outer: w_t, the weights that all groups had after the last meeting.
      local: w_i, this replica's.
      momenta: b; empty for `LocalSGD`.
      reducer: exchanges.
      rank: the calling replica.
    """
    if not isinstance(sync, DiLoCo):
        return mean_over_groups(local, reducer, rank), []
    movements = [before - after for before, after in zip(outer, local, strict=True)]
    means = mean_over_groups(movements, reducer, rank)
    rate, mu = sync.outer_learning_rate, sync.outer_momentum
    momenta = [mu * b + d for b, d in zip(momenta, means, strict=True)]
    weights = [
        w - rate * (d + mu * b) for w, d, b in zip(outer, means, momenta, strict=True)
    ]
    return weights, momenta
