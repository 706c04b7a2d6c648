"""A `MirroredExtended` that stays in replica context while a graph is built.

Stock MirroredStrategy stops all replicas at every reduction and update (`merge_call`),
which cannot happen inside conditionals. Here each replica reduces and updates by
itself, so Keras' accumulation, EMA overwrite and steps_per_execution work unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdp._private import names
from tfdp.exchange.reducer import Reducer
from tfdp.plan.shards import Sharding
from tfdp.step.local_step import refuse_in_local_step
from tfdp.strategies.replica_extended import ReplicaExtended
from tfdp.tracing.effect_order import ReplicaEffects, warn_about_shared
from tfdp.tracing.step import Step
from tfdp.variables.global_seed import independent_draws, with_global_seed
from tfdp.variables.in_shards import InShards
from tfdp.variables.local_view import LocalView
from tfdp.variables.mirrored import (
    ReplicaMirroredVariable,
    ReplicaOnReadVariable,
    SeedVariable,
)
from tfdp.variables.own_values import OwnSumVariable

if TYPE_CHECKING:
    from tfdp.sharding.updates import ShardUpdates


class DataParallelExtended(ReplicaExtended, names.MirroredExtended):
    """`MirroredExtended` that reduces and updates in replica context."""

    replica_classes = ReplicaMirroredVariable, OwnSumVariable, SeedVariable

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        devices: Sequence[str],
        reducer: Reducer,
        cross_device_ops: tf.distribute.CrossDeviceOps,
        *,
        draws_per_replica: bool = True,
        sharding: Sharding | None = None,
    ):
        self.reducer = reducer
        self.shards: ShardUpdates | None = None
        if sharding is not None and sharding.is_needed(reducer.transport.parts):
            from tfdp.sharding.updates import ShardUpdates

            self.shards = ShardUpdates(strategy, devices, reducer, sharding)
        self.current_step = Step(len(devices))
        self.remember_made()
        self._draws_per_replica = draws_per_replica
        super().__init__(strategy, list(devices), cross_device_ops)

    def update_own_copy(self, variable: Any, fn: Callable, value: Any) -> None:
        """Calls `fn(component, value)` with the calling replica's component."""
        component = names.own_copy(variable, names.current_rank())
        with tf.device(component.device):
            fn(component, value)

    def _replica_ctx_update(
        self, var: Any, fn: Callable, args: Any, kwargs: Any, group: Any
    ) -> Any:
        if isinstance(var, InShards):
            return self.shards_in_use().update(var, fn, args, kwargs)
        result = super()._replica_ctx_update(var, fn, args, kwargs, group)
        if isinstance(var, LocalView):
            var.note_update()
        return result

    def _make_collective_ops_with_fallbacks(self) -> tf.distribute.CrossDeviceOps:
        # The stock collectives share their keys among all strategies of the process,
        # which breaks the second one.
        return self._cross_device_ops

    def _get_cross_device_ops(self, value: Any) -> tf.distribute.CrossDeviceOps:
        return self._cross_device_ops

    def _use_merge_call(self) -> bool:
        return False

    def _call_for_each_replica(self, fn: Callable, args: Any, kwargs: Any) -> Any:
        first_draw = self.first_draw if self._draws_per_replica else None
        with self.building_replicas(), independent_draws(first_draw) as draw_as:
            effects = ReplicaEffects()
            fn = effects.seen(with_global_seed(fn, draw_as))
            result = super()._call_for_each_replica(fn, args, kwargs)
            warn_about_shared(self.current_step, effects.put_in_order())
        return result

    def _replica_ctx_all_reduce(
        self, reduce_op: Any, value: Any, options: Any = None
    ) -> Any:
        step, rank = self.current_step, names.current_rank()
        has_shards = self.shards is not None
        value = _to_reduce(step, rank, reduce_op, value, has_shards=has_shards)
        refuse_in_local_step(self.current_step)
        return self.reduced(reduce_op, value)

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        self.note_maker()
        shards = self.shards
        shard_class: Any = None
        if kwargs.get("initial_value") is not None:
            if shards is not None or not tf.executing_eagerly():
                value = self.draw_start(kwargs, self.worker_devices[0])
            if shards is not None:
                shard_class = shards.class_of(kwargs, value)
                if shard_class is not None and shard_class.is_stored_in_shards:
                    value = self._common_start(value, kwargs)
                    return shards.make(shard_class, next_creator, kwargs, value)
        variable = super()._create_variable(next_creator, **kwargs)
        if type(variable) is names.SyncOnReadVariable:
            return ReplicaOnReadVariable(
                variable.distribute_strategy, variable.values, variable.aggregation
            )
        if type(variable) is not names.MirroredVariable:
            return variable
        return self.made_for_replicas(variable, shard_class, kwargs)

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: Any, primary_var: Any, **kwargs: Any
    ) -> Any:
        """The initial value of a copy: in a graph, one draw for all copies.

        TensorFlow initializes further copies from the first one. Ops that read a
        variable cannot be lifted out of the `tf.function` that creates it, and XLA does
        not compile such functions.
        """
        if not tf.executing_eagerly():
            return kwargs["initial_value"]
        return super()._get_variable_creator_initial_value(
            replica_id, device, primary_var, **kwargs
        )

    def _common_start(self, value: tf.Tensor, kwargs: dict[str, Any]) -> tf.Tensor:
        """The initial value, on all hosts, of a variable stored in shards."""
        return value


def _to_reduce(
    step: Step, rank: Any, reduce_op: Any, value: Any, *, has_shards: bool
) -> Any:
    """A replica's input to a user's reduction, without dummy rows."""
    shards: Any = None
    if has_shards:
        from tfdp.chain import shards

        shards.refuse_sum_of_shards(step, rank, value)
    if reduce_op != tf.distribute.ReduceOp.SUM:
        return value

    def part_to_sum(part: Any) -> Any:
        if shards is not None and shards.depends_on_shards(step, rank, part):
            return part  # it has no dummy rows
        return step.parts_to_sum(rank, part)

    return tf.nest.map_structure(part_to_sum, value)
