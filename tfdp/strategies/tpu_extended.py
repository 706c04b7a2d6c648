"""The TPU strategy's inside: a `TPUExtended` whose replicas never leave their context.

TensorFlow traces one function for all replicas and hands it to XLA; the rank is a
tensor in it. Reduction and updates are ops of that one program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdp._private.names import stop_recording
from tfdp._private.tpu_names import TPUExtended, TPUMirroredVariable, pack_variables
from tfdp.data.lasting_input import LastingInput
from tfdp.exchange.reducer import Reducer
from tfdp.plan.shards import Sharding
from tfdp.sharding.tpu_variables import tpu_shard_class
from tfdp.sharding.updates import ShardUpdates
from tfdp.sharding.variables import ShardedVariable
from tfdp.strategies.extended import SHARD_CLASSES, reduced_by, shards_of_extended
from tfdp.strategies.global_seed import with_global_seed
from tfdp.strategies.made_optimizers import MadeOptimizers
from tfdp.strategies.scope_checks import check_component
from tfdp.tracing.run import ReplicaRun
from tfdp.variables.mirrored import is_seed_state
from tfdp.variables.tpu import TPUReplicaVariable, TPUSeedVariable

__all__ = ["TPUDataParallelExtended"]


class TPUDataParallelExtended(LastingInput, TPUExtended):
    """`TPUExtended` that reduces and updates in replica context.

    Args:
      strategy: the strategy it belongs to.
      resolver: a `tf.distribute.cluster_resolver.TPUClusterResolver`.
      make_reducer: makes what moves tensors between N replicas, from N.
      draws_per_replica: whether random layers draw apart on every replica.
      sharding: what each replica holds a shard of only.
      device_assignment: see `tf.distribute.TPUStrategy`; None for all cores.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        resolver: Any,
        make_reducer: Callable[[int], Reducer],
        *,
        draws_per_replica: bool = True,
        sharding: Sharding | None = None,
        device_assignment: Any = None,
    ):
        self._draws_per_replica = draws_per_replica
        #: Whether an update of one variable is being built: assignments are final.
        self.is_updating_own_copy = False
        self.made_optimizers = MadeOptimizers()
        self.shards: ShardUpdates | None = None
        super().__init__(strategy, resolver, device_assignment=device_assignment)
        # Classes of variables, not policies, say how a variable behaves: ours are such.
        self._use_var_policy = False
        self.current_run = ReplicaRun(self._num_replicas_in_sync)
        self.reducer = make_reducer(self._num_replicas_in_sync)
        if sharding is not None and sharding.is_needed(self.reducer.shard_parts):
            self.shards = ShardUpdates(
                strategy, self.worker_devices, self.reducer, sharding
            )
        pack_variables(strategy)

    def update(self, var: Any, fn: Callable, *args: Any, **kwargs: Any) -> Any:
        """Updates a variable of this strategy; see `StrategyExtended.update`."""
        check_component(var, self._container_strategy())
        return super().update(var, fn, *args, **kwargs)

    def colocate_vars_with(self, colocate_with_variable: Any) -> Any:
        """Where slots go; see `StrategyExtended.colocate_vars_with`."""
        check_component(colocate_with_variable, self._container_strategy())
        return super().colocate_vars_with(colocate_with_variable)

    def update_own_copy(self, variable: Any, fn: Callable, value: Any) -> None:
        """Calls `fn` with the calling replica's copy of `variable`, and `value`."""
        with self._updating_own_copy():
            fn(variable, value)

    def update_whole(self, variable: Any, fn: Callable, value: Any, kwargs: Any) -> Any:
        """Assigns to all copies of a variable, in cross-replica context."""
        return super()._update(variable, fn, (value,), kwargs, True)

    def read_sharded(self, variable: ShardedVariable, rank: Any) -> tf.Tensor:
        """The whole of a sharded variable, in replica context."""
        return shards_of_extended(self).read(variable, rank)

    def _update(
        self, var: Any, fn: Callable, args: Any, kwargs: Any, group: bool
    ) -> Any:
        if isinstance(var, SHARD_CLASSES):
            return shards_of_extended(self).update_across(var, fn, args, kwargs)
        return super()._update(var, fn, args, kwargs, group)

    @contextlib.contextmanager
    def _updating_own_copy(self) -> Iterator[None]:
        before, self.is_updating_own_copy = self.is_updating_own_copy, True
        try:
            yield
        finally:
            self.is_updating_own_copy = before

    def _use_merge_call(self) -> bool:
        return False

    def tpu_run(self, fn: Callable, args: Any, kwargs: Any, options: Any = None) -> Any:
        """Traces `fn` once and runs it on every core."""
        self.reducer.begin_run()
        if self.shards is not None:
            self.shards.forget_views()
        return super().tpu_run(with_global_seed(fn), args, kwargs, options)

    def _replica_ctx_all_reduce(
        self, reduce_op: Any, value: Any, options: Any = None
    ) -> Any:
        return reduced_by(self.reducer, reduce_op, value)

    def _replica_ctx_update(
        self,
        var: Any,
        fn: Callable,
        args: Any = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> Any:
        with self._updating_own_copy():
            if isinstance(var, SHARD_CLASSES):
                result = shards_of_extended(self).update(var, fn, args, kwargs)
            else:
                result = fn(var, *args, **(kwargs or {}))
        return result if group else (result,)

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        self.made_optimizers.note_maker()
        shards, shard_class = self.shards, None
        if shards is not None and kwargs.get("initial_value") is not None:
            kwargs["initial_value"] = value = self._first_value(kwargs)
            shard_class = shards.class_of(kwargs, value)
            if shard_class is not None:
                shard_class = tpu_shard_class(shard_class)
            if shard_class is not None and issubclass(shard_class, ShardedVariable):
                return shards.make(shard_class, next_creator, kwargs, value)
        variable = super()._create_variable(next_creator, **kwargs)
        if type(variable) is not TPUMirroredVariable:
            return variable
        own_draws = self._draws_per_replica and is_seed_state(variable)
        variable_class = TPUSeedVariable if own_draws else TPUReplicaVariable
        return (shard_class or variable_class)(
            variable.distribute_strategy, variable.values, variable.aggregation
        )

    def _first_value(self, kwargs: dict[str, Any]) -> tf.Tensor:
        """What the variable about to be made starts as: drawn once, on the host."""
        initial = kwargs["initial_value"]
        with tf.device("CPU:0"), stop_recording():
            return tf.convert_to_tensor(
                initial() if callable(initial) else initial, dtype=kwargs.get("dtype")
            )
