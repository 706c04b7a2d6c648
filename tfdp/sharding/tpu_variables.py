"""Sharded variables for TPU replicas.

All replicas share one graph: a handle stands for every replica's shard, and the rank is
a tensor.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp._private.names import current_rank
from tfdp._private.tpu_names import assign_in_replica, in_tpu_replica, read_stored
from tfdp.exchange.shards import shard_of
from tfdp.sharding.updates import ShardUpdates
from tfdp.sharding.variables import ShardedVariable, ShardUpdatedVariable, updating_rank
from tfdp.variables.tpu import AssignedInReplica, TPUReplicaVariable


class TPUShardedVariable(AssignedInReplica, ShardedVariable):
    """A variable of which each TPU core stores one flat shard."""

    # TPU cores have no op that copies a piece; the host does, and sends it.
    cutting_device = "CPU:0"

    def shard(self, rank: Any) -> Any:
        """A replica's stored variable; within a replica, this variable itself."""
        return super().shard(rank) if isinstance(rank, int) else self

    def read_shard(self, rank: Any) -> tf.Tensor:
        return self._own_shard() if in_tpu_replica() else super().read_shard(rank)

    def _own_shard(self) -> tf.Tensor:
        value = read_stored(self)
        return tf.ensure_shape(value, [self.layout.shard_elements])

    def _read_variable_op(self) -> tf.Tensor:
        """The shard during an update, otherwise the whole."""
        if updating_rank() is not None:
            return self._own_shard()
        return self._read_in_replica()

    def _stored(self) -> tf.Tensor:
        return self._read_variable_op()

    def _together(self, value: tf.Tensor) -> tf.Tensor:
        return value

    def assign_here(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        value = tf.cast(value, self.dtype)
        if updating_rank() is None:
            value = shard_of(value, self.layout, current_rank())
        value = tf.ensure_shape(value, [self.layout.shard_elements])
        return assign_in_replica(self, value, *args, **kwargs)


class TPUShardUpdatedVariable(TPUReplicaVariable, ShardUpdatedVariable):
    """A weight with a copy on every TPU core, of which each core updates its shard."""

    def _get(self) -> Any:
        # In a replica the rank is a tensor, which cannot index the components.
        return self._read_variable_op() if in_tpu_replica() else super()._get()

    def _read_variable_op(self) -> tf.Tensor:
        whole = super()._read_variable_op()
        rank = updating_rank()
        if rank is None or not in_tpu_replica():
            return whole
        return shard_of(whole, self.layout, rank)


class TPUShardUpdates(ShardUpdates):
    """`ShardUpdates` whose variables are those of TPU replicas."""

    def class_of(self, kwargs: dict[str, Any], value: tf.Tensor) -> type | None:
        shard_class = super().class_of(kwargs, value)
        if shard_class is None:
            return None
        is_stored = issubclass(shard_class, ShardedVariable)
        return TPUShardedVariable if is_stored else TPUShardUpdatedVariable
