"""Variables of TPU replicas: assigned by each replica, in one graph for all.

The rules are those of `tfdp.variables.mirrored`; stock TPU variables would leave the
replica context to aggregate, and not synchronize moving statistics of the cores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp._private.names import current_rank
from tfdp._private.tpu_names import (
    TPUMirroredVariable,
    TPUVariableMixin,
    assign_in_replica,
    in_tpu_replica,
    read_stored,
)
from tfdp.errors import CollectiveError
from tfdp.tracing.state_checks import is_same_on_every_replica
from tfdp.tracing.stored_state import note_local_state
from tfdp.variables.mirrored import OwnMeans, PythonValue, seed_offset
from tfdp.variables.own_values import OwnSums


class AssignedInReplica(TPUVariableMixin):
    """Assignments within a replica; a mixin for TPU variables."""

    def _stored(self) -> tf.Tensor:
        raise NotImplementedError

    def _together(self, value: tf.Tensor) -> tf.Tensor:
        """`value` aggregated over the replicas."""
        raise NotImplementedError

    def assign_here(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not in_tpu_replica():
            return super().assign(value, *args, **kwargs)
        return self.assign_here(value, *args, **kwargs)

    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        if not in_tpu_replica():
            return super().assign_add(delta, *args, **kwargs)
        stored = self._stored()
        delta = self._together(tf.convert_to_tensor(delta, stored.dtype))
        return assign_in_replica(self, stored + delta, *args, **kwargs)

    def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        if not in_tpu_replica():
            return super().assign_sub(delta, *args, **kwargs)
        delta = tf.convert_to_tensor(delta, self.dtype)
        return self.assign_add(-delta, *args, **kwargs)


class TPUReplicaVariable(PythonValue, OwnMeans, AssignedInReplica, TPUMirroredVariable):
    """A variable with a copy on every TPU core, which each replica assigns."""

    def _stored(self) -> tf.Tensor:
        return read_stored(self)

    def scatter_add(self, sparse_delta: Any, *args: Any, **kwargs: Any) -> Any:
        """Adds slices that are identical on every replica, as stock ones cannot."""
        plain, op = super().scatter_add, tf.raw_ops.ResourceScatterAdd
        return self._scatter(op, plain, sparse_delta, *args, **kwargs)

    def scatter_sub(self, sparse_delta: Any, *args: Any, **kwargs: Any) -> Any:
        plain, op = super().scatter_sub, tf.raw_ops.ResourceScatterSub
        return self._scatter(op, plain, sparse_delta, *args, **kwargs)

    def scatter_update(self, sparse_delta: Any, *args: Any, **kwargs: Any) -> Any:
        plain, op = super().scatter_update, tf.raw_ops.ResourceScatterUpdate
        return self._scatter(op, plain, sparse_delta, *args, **kwargs)

    def _scatter(
        self, op: Callable, plain: Callable, slices: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not in_tpu_replica():
            return plain(slices, *args, **kwargs)
        if not self.distribute_strategy.extended.is_updating_own_copy:
            raise CollectiveError(
                f"Slices of the variable {self.name!r} are assigned outside of an "
                "optimizer's update; on a TPU they would differ between replicas. "
                "Assign the whole variable."
            )
        updates = tf.cast(slices.values, self.dtype)
        done = op(resource=self.handle, indices=slices.indices, updates=updates)
        with tf.control_dependencies([done]):
            return self._read_variable_op()

    def assign_here(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        value = self._together(tf.convert_to_tensor(value, self.dtype))
        return assign_in_replica(self, value, *args, **kwargs)

    def _together(self, value: tf.Tensor) -> tf.Tensor:
        extended = self.distribute_strategy.extended
        if extended.is_updating_own_copy:
            return value
        if self.aggregation == tf.VariableAggregation.NONE:
            if self.dtype.is_floating:
                note_local_state(extended.current_step, current_rank(), self)
                self.note_own()
            return value
        if self.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            step, rank = extended.current_step, current_rank()
            if is_same_on_every_replica(step, rank, value, self):
                return value
            return extended.reducer.broadcast(value, current_rank())
        mean = self.aggregation == tf.VariableAggregation.MEAN
        return extended.reducer.all_reduce([value], current_rank(), mean=mean)[0]


class TPUOwnSumVariable(OwnSums, TPUReplicaVariable):
    """An accumulator with an independent sum on each core."""


class TPUSeedVariable(TPUReplicaVariable):
    """See `tfdp.variables.mirrored.SeedVariable`; the numbers drawn are the same."""

    def own_offset(self) -> tf.Tensor | None:
        return seed_offset(current_rank(), self.dtype) if in_tpu_replica() else None

    def _read_variable_op(self) -> tf.Tensor:
        stored = super()._read_variable_op()
        offset = self.own_offset()
        return stored if offset is None else stored + offset

    def assign_here(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        offset = self.own_offset()
        value = tf.convert_to_tensor(value, self.dtype)
        if offset is not None:
            value = value - offset
        return super().assign_here(value, *args, **kwargs)
