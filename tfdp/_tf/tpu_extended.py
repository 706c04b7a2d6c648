"""The TPU strategy's inside: a `TPUExtended` whose replicas never leave their context.

TensorFlow traces one function for all replicas and hands it to XLA; the rank is a
tensor in it. Reduction and updates are ops of that one program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdp._tf.extended import ReplicaReducer
from tfdp._tf.keras_optimizers import refuse_unled
from tfdp._tf.names import current_rank
from tfdp._tf.replica_run import ReplicaRun
from tfdp._tf.scope_checks import check_component
from tfdp._tf.tpu_names import TPUExtended, TPUMirroredVariable
from tfdp._tf.tpu_variables import TPUReplicaVariable, TPUSeedVariable
from tfdp._tf.variables import is_seed_state

__all__ = ["TPUDataParallelExtended"]


class TPUDataParallelExtended(TPUExtended):
    """`TPUExtended` that reduces and updates in replica context.

    Args:
      strategy: the strategy it belongs to.
      resolver: a `tf.distribute.cluster_resolver.TPUClusterResolver`.
      make_reducer: makes what moves tensors between N replicas, from N.
      draws_per_replica: whether random layers draw apart on every replica.
      wire_dtype: the type in which gradients travel; None for their own.
      device_assignment: see `tf.distribute.TPUStrategy`; None for all cores.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        resolver: Any,
        make_reducer: Callable[[int], ReplicaReducer],
        *,
        draws_per_replica: bool = True,
        wire_dtype: str | None = None,
        device_assignment: Any = None,
    ):
        self.wire_dtype = wire_dtype
        self._draws_per_replica = draws_per_replica
        #: Whether an update of one variable is being built: assignments are final.
        self.is_updating_own_copy = False
        super().__init__(strategy, resolver, device_assignment=device_assignment)
        # Classes of variables, not policies, say how a variable behaves: ours are such.
        self._use_var_policy = False
        self.current_run = ReplicaRun(self._num_replicas_in_sync)
        self.reducer = make_reducer(self._num_replicas_in_sync)
        # As in stock TPUStrategy: one handle for all copies of a variable.
        strategy._enable_packed_variable_in_eager_mode = True

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
        return super().tpu_run(fn, args, kwargs, options)

    def _replica_ctx_all_reduce(
        self, reduce_op: Any, value: Any, options: Any = None
    ) -> Any:
        refuse_unled(value)
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        flat = tf.nest.flatten(value)
        reduced = self.reducer.all_reduce(flat, current_rank(), mean=mean)
        return tf.nest.pack_sequence_as(value, reduced)

    def _replica_ctx_update(
        self,
        var: Any,
        fn: Callable,
        args: Any = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> Any:
        with self._updating_own_copy():
            result = fn(var, *args, **(kwargs or {}))
        return result if group else (result,)

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        variable = super()._create_variable(next_creator, **kwargs)
        if type(variable) is not TPUMirroredVariable:
            return variable
        own_draws = self._draws_per_replica and is_seed_state(variable)
        variable_class = TPUSeedVariable if own_draws else TPUReplicaVariable
        return variable_class(
            variable.distribute_strategy, variable.values, variable.aggregation
        )
