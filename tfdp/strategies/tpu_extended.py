"""The TPU strategy's inside: a `TPUExtended` whose replicas never leave their context.

TensorFlow traces one function for all replicas and hands it to XLA; the rank is a
tensor in it. Reduction and updates are ops of that one program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdp._private.tpu_names import TPUExtended, TPUMirroredVariable, pack_variables
from tfdp.exchange.reducer import Reducer
from tfdp.plan.shards import Sharding
from tfdp.sharding.tpu_variables import tpu_shard_class
from tfdp.sharding.updates import SHARD_CLASSES, ShardUpdates
from tfdp.sharding.variables import ShardedVariable
from tfdp.strategies.replica_extended import ReplicaExtended
from tfdp.tracing.run import ReplicaRun
from tfdp.variables.global_seed import with_global_seed
from tfdp.variables.tpu import (
    TPUOwnSumVariable,
    TPUReplicaVariable,
    TPUSeedVariable,
)

__all__ = ["TPUDataParallelExtended"]


class TPUDataParallelExtended(ReplicaExtended, TPUExtended):
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
        self.remember_made()
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

    def update_own_copy(self, variable: Any, fn: Callable, value: Any) -> None:
        """Calls `fn` with the calling replica's copy of `variable`, and `value`."""
        with self._updating_own_copy():
            fn(variable, value)

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
        self.begin_run()
        return super().tpu_run(with_global_seed(fn), args, kwargs, options)

    def _replica_ctx_all_reduce(
        self, reduce_op: Any, value: Any, options: Any = None
    ) -> Any:
        return self.reduced(reduce_op, value)

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
                result = self.shards_in_use().update(var, fn, args, kwargs)
            else:
                result = fn(var, *args, **(kwargs or {}))
        return result if group else (result,)

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        self.note_maker()
        shards, shard_class = self.shards, None
        if shards is not None and kwargs.get("initial_value") is not None:
            value = self.draw_start(kwargs, "CPU:0")
            shard_class = shards.class_of(kwargs, value)
            if shard_class is not None:
                shard_class = tpu_shard_class(shard_class)
            if shard_class is not None and issubclass(shard_class, ShardedVariable):
                return shards.make(shard_class, next_creator, kwargs, value)
        variable = super()._create_variable(next_creator, **kwargs)
        if type(variable) is not TPUMirroredVariable:
            return variable
        own = self.has_own_sums(kwargs)
        plain = TPUOwnSumVariable if own else TPUReplicaVariable
        return self.made_for_replicas(variable, shard_class, plain, TPUSeedVariable)
