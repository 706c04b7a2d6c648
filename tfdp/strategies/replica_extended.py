"""What the insides of all strategies share: updates, shards, what replicas sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.names import current_rank, in_compiled_function, stop_recording
from tfdp.data.owned_input import LastingInput
from tfdp.errors import CollectiveError, ScopeError
from tfdp.exchange.reducer import Reducer
from tfdp.sharding.updates import ACCUMULATOR_NAME, SHARD_CLASSES, ShardUpdates
from tfdp.sharding.variables import ShardedVariable
from tfdp.step.optimizers import check_overridden
from tfdp.strategies.scope import MadeInScope, check_component
from tfdp.tracing.run import ReplicaRun
from tfdp.variables.mirrored import is_seed_state


class ReplicaExtended(LastingInput):
    """For an extended strategy whose replicas reduce and update on their own; a mixin.

    It stands before TensorFlow's class among the bases.
    """

    #: Moves tensors between replicas, in replica context.
    reducer: Reducer
    #: Makes and updates what is sharded; None: nothing is.
    shards: ShardUpdates | None
    current_run: ReplicaRun
    made_optimizers: MadeInScope[keras.optimizers.Optimizer]
    made_metrics: MadeInScope[keras.metrics.Metric]
    #: Whether random layers draw apart on every replica.
    _draws_per_replica: bool
    #: The rank of this process's first replica among those that step together.
    first_rank = 0
    #: Which of the draws that are apart the first replica here has.
    first_draw = 0

    def update(self, var: Any, fn: Callable, *args: Any, **kwargs: Any) -> Any:
        """Updates a variable of this strategy; see `StrategyExtended.update`."""
        check_component(var, self._container_strategy())  # type: ignore[attr-defined]
        return super().update(var, fn, *args, **kwargs)  # type: ignore[misc]

    def colocate_vars_with(self, colocate_with_variable: Any) -> Any:
        """Where slots go; see `StrategyExtended.colocate_vars_with`."""
        strategy = self._container_strategy()  # type: ignore[attr-defined]
        check_component(colocate_with_variable, strategy)
        return super().colocate_vars_with(colocate_with_variable)  # type: ignore[misc]

    def update_whole(self, variable: Any, fn: Callable, value: Any, kwargs: Any) -> Any:
        """Assigns to all copies of a variable, in cross-replica context."""
        return super()._update(variable, fn, (value,), kwargs, True)  # type: ignore[misc]

    def read_sharded(self, variable: ShardedVariable, rank: Any) -> tf.Tensor:
        """The whole of a sharded variable, in replica context.

        Raises:
          CollectiveError: within a function that XLA compiles, and not as part of a
            step that it compiles as a whole.
        """
        strategy = self._container_strategy()  # type: ignore[attr-defined]
        if in_compiled_function() and not strategy.compiles_steps:
            raise CollectiveError(
                f"The variable {variable.name!r} is stored in shards "
                f"(shard={strategy.shard!r}), which a function that XLA compiles "
                "(jit_compile=True) cannot gather. Compile the model with "
                'jit_compile=False, or take shard="gradients", which keeps weights '
                "whole."
            )
        return self.shards_in_use().read(variable, rank)

    def shards_in_use(self) -> ShardUpdates:
        """What updates the shards.

        Raises:
          ScopeError: when the strategy does not shard.
        """
        if self.shards is None:
            raise ScopeError(
                "A sharded variable is used under a strategy that does not shard. Use "
                "it under the strategy in whose scope it was made."
            )
        return self.shards

    def remember_made(self) -> None:
        """Before the first variable is made: begins to remember who makes them."""
        self.made_optimizers = MadeInScope(keras.optimizers.Optimizer)
        self.made_metrics = MadeInScope(keras.metrics.Metric)

    def note_maker(self) -> None:
        """Notes the optimizer or metric that is making a variable, if one is."""
        self.made_optimizers.note_maker()
        self.made_metrics.note_maker()

    def begin_run(self) -> None:
        """Before the replicas of one `strategy.run` are traced."""
        self.reducer.begin_run()
        if self.shards is not None:
            self.shards.forget_views()

    def reduced(self, reduce_op: Any, value: Any) -> Any:
        """What a replica gets that asks TensorFlow for a sum or a mean, in a graph.

        Optimizers that the strategy leads do not ask TensorFlow; see
        `step.optimizers`.
        """
        flat, rank = tf.nest.flatten(value), current_rank()
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        if check_overridden(value) and not mean:
            results, _ = self.reducer.sum_gradients(flat, [], rank)
        else:
            results = self.reducer.all_reduce(flat, rank, mean=mean)
        return tf.nest.pack_sequence_as(value, results)

    def draw_start(self, kwargs: dict[str, Any], device: str) -> tf.Tensor:
        """What the variable about to be made starts as: drawn once, and kept."""
        initial = kwargs["initial_value"]
        with tf.device(device), stop_recording():
            value = tf.convert_to_tensor(
                initial() if callable(initial) else initial, dtype=kwargs.get("dtype")
            )
        kwargs["initial_value"] = value
        return value

    def has_own_sums(self, kwargs: dict[str, Any]) -> bool:
        """Whether a variable about to be made accumulates each replica's gradients.

        From stage 2 on every batch's gradients are summed over the replicas first.
        """
        shards, name = self.shards, kwargs.get("name") or ""
        is_of_sums = shards is not None and shards.stage > 1
        is_slot = kwargs.get("colocate_with") is not None
        return is_slot and ACCUMULATOR_NAME in name and not is_of_sums

    def made_for_replicas(
        self, variable: Any, shard_class: type | None, plain: type, seed: type
    ) -> Any:
        """TensorFlow's mirrored `variable` as replicas update it, and draw from it.

        Args:
          variable: as TensorFlow has made it.
          shard_class: the class of a variable that is updated by shards; None: whole.
          plain: the class of other variables.
          seed: the class of random generators' states that are seen apart.
        """
        own_draws = self._draws_per_replica and is_seed_state(variable)
        variable_class = shard_class or (seed if own_draws else plain)
        return variable_class(
            variable.distribute_strategy, variable.values, variable.aggregation
        )

    def _update(
        self, var: Any, fn: Callable, args: Any, kwargs: Any, group: Any
    ) -> Any:
        if isinstance(var, SHARD_CLASSES):
            return self.shards_in_use().update_across(var, fn, args, kwargs)
        return super()._update(var, fn, args, kwargs, group)  # type: ignore[misc]
