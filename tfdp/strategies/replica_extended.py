"""Shared base of all extended objects: updates, shards and user reductions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfdp._private.names import (
    MirroredVariable,
    current_rank,
    in_compiled_function,
    is_one_device,
    stop_recording,
)
from tfdp._private.optimizer_hooks import ACCUMULATOR_NAME
from tfdp.data.owned_input import LastingInput
from tfdp.errors import CollectiveError, ScopeError
from tfdp.exchange.reducer import Reducer
from tfdp.plan.shards import sharding_in
from tfdp.step.local_step import refuse_in_local_step
from tfdp.step.optimizers import sums_without_overrides
from tfdp.strategies.scope import MadeInScope, check_component, check_not_keras_2
from tfdp.tracing.step import Step
from tfdp.variables.in_shards import InShards, PlainUpdates
from tfdp.variables.mirrored import is_seed_state

if TYPE_CHECKING:
    from tfdp.sharding.updates import ShardUpdates
    from tfdp.sharding.variables import ShardedVariable


class ReplicaExtended(LastingInput):
    """Mixin, before TensorFlow's class: replicas reduce and update by themselves."""

    #: Exchanges tensors between replicas, in replica context.
    reducer: Reducer
    #: None: nothing is sharded.
    shards: ShardUpdates | None = None
    shards_class: type[ShardUpdates] | None = None
    #: How optimizers update the variables.
    updates = PlainUpdates()
    current_step: Step
    made_optimizers: MadeInScope[keras.optimizers.Optimizer]
    made_metrics: MadeInScope[keras.metrics.Metric]
    #: Of other variables, of gradient accumulators, of random generators' states.
    replica_classes: tuple[type, type, type]
    #: TensorFlow's class of the variables that become these.
    stock_class: Any = MirroredVariable
    #: The device that draws initial values.
    start_device: str
    #: Whether random layers draw independently on every replica.
    _draws_per_replica: bool
    #: The rank of this process's first replica among those that step together.
    first_rank = 0
    #: The index of the first replica's random draws among all replicas'.
    first_draw = 0

    def take_options(self, strategy: Any, devices: Sequence[str]) -> None:
        """Acts by the options that `strategy` is given; call it with a reducer."""
        self._draws_per_replica = bool(strategy.given["draws_per_replica"])
        sharding = sharding_in(strategy.given)
        is_needed = sharding.is_needed(self.reducer.transport.parts)
        if not is_needed and not strategy.given.has("layout"):
            return
        from tfdp.sharding.optimizers import ShardedUpdates
        from tfdp.sharding.updates import ShardUpdates

        shards_class = self.shards_class or ShardUpdates
        if strategy.given.has("layout"):
            from tfdp.grid.updates import HOST
            from tfdp.grid.updates import GridUpdates as shards_class

            self.start_device = HOST
        self.shards = shards_class(strategy, devices, self.reducer, sharding)
        self.updates = ShardedUpdates(self.shards)

    def update(
        self,
        var: Any,
        fn: Callable,
        args: Any = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> Any:
        strategy = self._container_strategy()  # type: ignore[attr-defined]
        check_not_keras_2(strategy)
        if getattr(var, "distribute_strategy", None) is not strategy:
            check_component(var, strategy)
        if is_one_device():
            return fn(var, *args, **(kwargs or {}))  # what it assigns, all copies get
        return super().update(var, fn, args, kwargs, group)  # type: ignore[misc]

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        strategy = self._container_strategy()  # type: ignore[attr-defined]
        check_component(colocate_with_variable, strategy)
        # A step on one device has left the scope.
        scope = strategy.scope() if is_one_device() else contextlib.nullcontext()
        with scope, super().colocate_vars_with(colocate_with_variable):  # type: ignore[misc]
            yield

    def update_whole(self, variable: Any, fn: Callable, value: Any, kwargs: Any) -> Any:
        """Assigns to all copies of a variable, in cross-replica context."""
        return super()._update(variable, fn, (value,), kwargs, True)  # type: ignore[misc]

    def read_sharded(self, variable: ShardedVariable, rank: Any) -> tf.Tensor:
        """The whole of a sharded variable, in replica context."""
        strategy = self._container_strategy()  # type: ignore[attr-defined]
        if in_compiled_function() and not strategy.compiles_steps:
            raise CollectiveError(
                f"The variable {variable.name!r} is stored in shards "
                f"({variable.stored_by}), which functions that XLA compiles cannot "
                "gather. Use jit_compile=False, or have whole weights: leave out "
                f'{variable.stored_by} (shard="gradients" works).'
            )
        return self.shards_in_use().read(variable, rank)

    def shards_in_use(self) -> ShardUpdates:
        """`shards`; refuses a strategy that does not shard."""
        if self.shards is None:
            raise ScopeError(
                "A sharded variable is used under a strategy that does not shard. Use "
                "it under the strategy that created it."
            )
        return self.shards

    def remember_made(self) -> None:
        """Tracks optimizers and metrics; called before the first variable exists."""
        self.made_optimizers = MadeInScope(keras.optimizers.Optimizer)
        self.made_metrics = MadeInScope(keras.metrics.Metric)

    def note_maker(self) -> None:
        """Tracks the optimizer or metric that is creating a variable, if any."""
        check_not_keras_2(self._container_strategy())  # type: ignore[attr-defined]
        optimizer = self.made_optimizers.note_maker()
        if optimizer is not None:
            self.note_optimizer(optimizer)
        self.made_metrics.note_maker()

    def note_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Tracks an optimizer of this strategy."""
        self.made_optimizers.note(optimizer)
        if self.shards is not None:
            self.shards.note_optimizer(optimizer)

    @contextlib.contextmanager
    def building_replicas(self) -> Iterator[None]:
        """Prepares for the replicas of a `strategy.run`, traced within the context."""
        with self.reducer.transport.run():
            yield

    def _use_merge_call(self) -> bool:
        return False

    def _replica_ctx_all_reduce(
        self, reduce_op: Any, value: Any, options: Any = None
    ) -> Any:
        flat = tf.nest.flatten(value)
        if all(isinstance(part, tf.Tensor) for part in flat):
            return self._reduced(reduce_op, value)
        from tfdp.chain.table_rows import reduce_as_one_device

        reduce = functools.partial(self._reduced, reduce_op)
        results = reduce_as_one_device(flat, self.current_step, current_rank(), reduce)
        return tf.nest.pack_sequence_as(value, results)

    def _real_input(self, reduce_op: Any, value: Any) -> Any:
        """A replica's input to a user's reduction, without dummy rows."""
        step, rank = self.current_step, current_rank()
        shards: Any = None
        if self.shards is not None:
            from tfdp.chain import shards

            shards.refuse_sum_of_shards(step, rank, value)
        if reduce_op != tf.distribute.ReduceOp.SUM:
            return value

        def part_to_sum(part: Any) -> Any:
            if shards is not None and shards.depends_on_shards(step, rank, part):
                return part  # it has no dummy rows
            return step.parts_to_sum(rank, part)

        return tf.nest.map_structure(part_to_sum, value)

    def _reduced(self, reduce_op: Any, value: Any) -> Any:
        """A user's sum or mean in a graph, outside of overridden optimizers."""
        value = self._real_input(reduce_op, value)
        refuse_in_local_step(self.current_step)
        flat, rank = tf.nest.flatten(value), current_rank()
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        if sums_without_overrides() and not mean:
            results, _ = self.reducer.sum_gradients(flat, [], rank)
        else:
            results = self.reducer.all_reduce(flat, rank, mean=mean)
        return tf.nest.pack_sequence_as(value, results)

    def draw_start(self, kwargs: dict[str, Any]) -> tf.Tensor:
        """The initial value of a variable about to be created, drawn once."""
        initial = kwargs["initial_value"]
        with tf.device(self.start_device), stop_recording():
            value = tf.convert_to_tensor(
                initial() if callable(initial) else initial, dtype=kwargs.get("dtype")
            )
        kwargs["initial_value"] = value
        return value

    def common_start(self, value: tf.Tensor, kwargs: dict[str, Any]) -> tf.Tensor:
        """The initial value, on all hosts, of a variable stored in shards."""
        return value

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        self.note_maker()
        shards = self.shards
        shard_class: Any = None
        if shards is not None and kwargs.get("initial_value") is not None:
            value = self.draw_start(kwargs)
            shard_class = shards.class_of(kwargs, value)
            if shard_class is not None and shard_class.is_stored_in_shards:
                value = self.common_start(value, kwargs)
                return shards.make(shard_class, next_creator, kwargs, value)
        variable: Any = super()._create_variable(next_creator, **kwargs)  # type: ignore[misc]
        if type(variable) is not self.stock_class:
            return variable
        variable_class = shard_class or self._class_for(variable, kwargs)
        return variable_class(
            variable.distribute_strategy, variable.values, variable.aggregation
        )

    def _class_for(self, variable: Any, kwargs: dict[str, Any]) -> Any:
        """The class of tfdp's for TensorFlow's `variable`, created with `kwargs`."""
        plain, own_sums, seed = self.replica_classes
        if self._draws_per_replica and is_seed_state(variable):
            return seed
        is_accumulator = ACCUMULATOR_NAME in (kwargs.get("name") or "")
        is_of_weight = kwargs.get("colocate_with") is not None
        if is_accumulator and is_of_weight and not self.updates.sums_every_batch:
            return own_sums
        return plain

    def _replica_ctx_update(
        self,
        var: Any,
        fn: Callable,
        args: Any = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> Any:
        if isinstance(var, InShards):
            return self.shards_in_use().update(var, fn, args, kwargs)
        return self.update_copy(var, fn, args, kwargs, group)

    def update_copy(
        self, var: Any, fn: Callable, args: Any, kwargs: Any, group: Any
    ) -> Any:
        """Updates the calling replica's copy of a variable that is not in shards."""
        return super()._replica_ctx_update(var, fn, args, kwargs, group)  # type: ignore[misc]

    def _update(
        self, var: Any, fn: Callable, args: Any, kwargs: Any, group: Any
    ) -> Any:
        if isinstance(var, InShards):
            return self.shards_in_use().update_across(var, fn, args, kwargs)
        return super()._update(var, fn, args, kwargs, group)  # type: ignore[misc]
