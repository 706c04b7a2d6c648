"""Groups of replicas that share statistics, and their two exchanges."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp._private.names import replicas_of
from tfdp.errors import ConfigurationError


class ReplicaGroup:
    """Groups of consecutive ranks: 0..g-1, g..2g-1, and so on, for group size g.

    Created in the replica function, for the calling replica. Elsewhere (a model that is
    being built, or no strategy) there is one replica and no exchange.
    """

    def __init__(self, group_size: int | None):
        context = tf.distribute.get_replica_context()
        self._context: Any = context
        self.replicas = replicas_of(context.strategy) if context else 1
        self.group_size = group_size or self.replicas
        if context and self.replicas % self.group_size:
            raise ConfigurationError(
                f"SyncBatchNormalization(group_size={self.group_size}) is called on "
                f"{self.replicas} replica(s), which it does not divide. Choose a "
                "group_size that does, or None for one group of all."
            )

    @property
    def groups(self) -> int:
        return max(self.replicas // self.group_size, 1)

    @property
    def own(self) -> Any:
        """The index of this replica's group: a tensor, or 0 for a single group."""
        if self.groups == 1:
            return 0
        return self._context.replica_id_in_sync_group // self.group_size

    def gather(self, vector: tf.Tensor) -> tf.Tensor:
        """All replicas' `vector` of K numbers, shape [groups, group size, K].

        Exact: each element of the sum has one contribution and zeros, and a NaN stays
        in its place.
        """
        elements = vector.shape[0]
        if self.replicas == 1:
            return tf.reshape(vector, [1, 1, elements])
        rank = self._context.replica_id_in_sync_group
        rows = self._sum(_in_slot(vector, rank, self.replicas))
        return tf.reshape(rows, [self.groups, -1, elements])

    def sum_within(self, vector: tf.Tensor) -> tf.Tensor:
        """The sum of `vector` over this replica's group."""
        if self.group_size == 1 or self.replicas == 1:
            return vector
        if self.groups == 1:
            return self._sum(vector)
        return self._sum(_in_slot(vector, self.own, self.groups))[self.own]

    def _sum(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._context.all_reduce(tf.distribute.ReduceOp.SUM, tensor)


def _in_slot(vector: tf.Tensor, slot: Any, slots: int) -> tf.Tensor:
    """Zeros of shape [slots, K] with `vector` in row `slot`."""
    shape = [slots, vector.shape[0]]
    return tf.scatter_nd([[slot]], vector[tf.newaxis], shape)
