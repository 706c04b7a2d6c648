"""A `MirroredExtended` that stays in replica context while a graph is built.

Stock MirroredStrategy stops all replicas at every reduction and update (`merge_call`),
which cannot happen inside conditionals. Here each replica reduces and updates by
itself, so Keras' accumulation, EMA overwrite and steps_per_execution work unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp._private import names
from tfdp.exchange.reducer import Reducer
from tfdp.strategies.replica_extended import ReplicaExtended
from tfdp.tracing.effect_order import ReplicaEffects, warn_about_shared
from tfdp.tracing.step import Step
from tfdp.variables.global_seed import independent_draws, with_global_seed
from tfdp.variables.local_view import LocalView
from tfdp.variables.mirrored import (
    ReplicaMirroredVariable,
    ReplicaOnReadVariable,
    SeedVariable,
)
from tfdp.variables.own_values import OwnSumVariable


class DataParallelExtended(ReplicaExtended, names.MirroredExtended):
    """`MirroredExtended` that reduces and updates in replica context."""

    replica_classes = ReplicaMirroredVariable, OwnSumVariable, SeedVariable

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        devices: Sequence[str],
        reducer: Reducer,
        cross_device_ops: tf.distribute.CrossDeviceOps,
    ):
        self.reducer = reducer
        self.start_device = devices[0]
        self.take_options(strategy, devices)
        self.current_step = Step(len(devices))
        self.remember_made()
        super().__init__(strategy, list(devices), cross_device_ops)

    def update_own_copy(self, variable: Any, fn: Callable, value: Any) -> None:
        """Calls `fn(component, value)` with the calling replica's component."""
        component = names.own_copy(variable, names.current_rank())
        with tf.device(component.device):
            fn(component, value)

    def update_copy(
        self, var: Any, fn: Callable, args: Any, kwargs: Any, group: Any
    ) -> Any:
        result = super().update_copy(var, fn, args, kwargs, group)
        if isinstance(var, LocalView):
            var.note_update()
        return result

    def _make_collective_ops_with_fallbacks(self) -> tf.distribute.CrossDeviceOps:
        # The stock collectives share their keys among all strategies of the process,
        # which breaks the second one.
        return self._cross_device_ops

    def _get_cross_device_ops(self, value: Any) -> tf.distribute.CrossDeviceOps:
        return self._cross_device_ops

    def _call_for_each_replica(self, fn: Callable, args: Any, kwargs: Any) -> Any:
        first_draw = self.first_draw if self._draws_per_replica else None
        with self.building_replicas(), independent_draws(first_draw) as draw_as:
            effects = ReplicaEffects()
            fn = effects.seen(with_global_seed(fn, draw_as))
            result = super()._call_for_each_replica(fn, args, kwargs)
            warn_about_shared(self.current_step, effects.put_in_order())
        return result

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        if not tf.executing_eagerly() and kwargs.get("initial_value") is not None:
            self.draw_start(kwargs)
        variable = super()._create_variable(next_creator, **kwargs)
        if type(variable) is not names.SyncOnReadVariable:
            return variable
        return ReplicaOnReadVariable(
            variable.distribute_strategy, variable.values, variable.aggregation
        )

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
