"""What happens to the weights when groups of replicas meet (`tfdp.sync`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp.exchange.compressed import CompressedSums
from tfdp.exchange.reducer import Reducer
from tfdp.step.compression import sum_compressed
from tfdp.sync.diloco import DiLoCo
from tfdp.sync.rounds import Sync

__all__ = [
    "compressed_mean_over_groups",
    "mean_over_groups",
    "mixed",
    "outer_update",
    "to_be_averaged",
]


def mean_over_groups(
    values: Sequence[tf.Tensor], reducer: Reducer, rank: Any
) -> list[tf.Tensor]:
    """The plain mean of each value over all groups, on every replica.

    All groups have as many replicas, and the replicas of a group the same values, so it
    is the mean over replicas. It counts no rows, as in the papers.

    Cost: 2 n (H - 1) / H bytes on the wire for n bytes on H hosts.
    """
    return reducer.all_reduce(values, rank, mean=True)


def compressed_mean_over_groups(
    compressed: CompressedSums,
    optimizer: keras.optimizers.Optimizer,
    replicas: int,
    reducer: Reducer,
    rank: Any,
    values: Sequence[tf.Tensor],
    variables: Sequence[Any],
) -> list[tf.Tensor]:
    """The same of outer gradients that are sent in fewer bytes.

    Args:
      compressed: by which method, and among whom.
      optimizer: it holds what is kept from meeting to meeting.
      replicas: on all hosts.
      reducer: what is not compressed goes this way.
      rank: the calling replica.
      values: outer gradients.
      variables: whose they are.
    """

    def plain_sums(
        gradients: list[Any], state: list[tf.Tensor], *, at_once: bool = False
    ) -> tuple[list, list]:
        sums = reducer.all_reduce([*gradients, *state], rank, mean=False)
        return sums[: len(gradients)], sums[len(gradients) :]

    sums, _ = sum_compressed(
        compressed, values, [], rank, variables, optimizer, plain_sums
    )
    return [total / replicas for total in sums]


def to_be_averaged(
    sync: Sync, outer: Sequence[tf.Tensor], local: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """What groups bring to a meeting: local weights, or for `DiLoCo` their movements.

    Args:
      sync: how they meet.
      outer: w_t, the weights that all groups had after the last meeting.
      local: w_i, this replica's.
    """
    if not isinstance(sync, DiLoCo):
        return list(local)
    return [before - after for before, after in zip(outer, local, strict=True)]


def outer_update(
    sync: Sync,
    outer: Sequence[tf.Tensor],
    momenta: Sequence[tf.Tensor],
    means: Sequence[tf.Tensor],
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The next outer weights w_(t+1), and the next outer momenta.

    Args:
      sync: `LocalSGD`, the mean of the local weights, or `DiLoCo`, whose equations are
        in its docstring.
      outer: w_t.
      momenta: b; empty for `LocalSGD`.
      means: of `to_be_averaged`, over all groups.
    """
    if not isinstance(sync, DiLoCo):
        return list(means), []
    rate, mu = sync.outer_learning_rate, sync.outer_momentum
    momenta = [mu * b + d for b, d in zip(momenta, means, strict=True)]
    weights = [
        w - rate * (d + mu * b) for w, d, b in zip(outer, means, momenta, strict=True)
    ]
    return weights, momenta


def mixed(share: float, local: tf.Tensor, outer: tf.Tensor) -> tf.Tensor:
    """Where local values go on after a meeting: share local + (1 - share) outer."""
    return share * local + (1 - share) * outer if share else outer
