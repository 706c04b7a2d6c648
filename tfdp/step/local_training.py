"""`LocalTraining`: what all values of `sync=` have in common in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from keras.optimizers import Optimizer

from tfdp.chain.groups import Exact, GroupState
from tfdp.chain.reduction import Reduction, Stage, reduce
from tfdp.errors import ConfigurationError
from tfdp.exchange.compressed import CompressedSums
from tfdp.exchange.reducer import Reducer
from tfdp.step.elastic_rounds import ElasticRounds
from tfdp.step.local_values import LocalValues
from tfdp.tracing.step import Step
from tfdp.tracing.stored_state import LocalState
from tfdp.variables.local_view import LocalView


class _LayerStateKept(set[int]):
    """Ids of state of layers that one of a step's optimizers keeps."""


class LocalTraining(Stage):
    """The training of the replicas that one optimizer updates, in groups.

    `optimizer` calls `reduced` with each update's gradients, and then makes its update
    within this stage; `synchronize_layer_state` takes the place of `reduced` in
    micro-steps without an update.
    """

    compressed: CompressedSums | None = None
    #: Elastic training: hosts may die and rejoin; else None.
    _elastic: ElasticRounds | None = None
    _weights: Sequence[LocalView]

    def __init__(
        self, strategy: tf.distribute.Strategy, group_size: int, optimizer: Optimizer
    ):
        self.group_size = group_size
        self._reducer: Reducer = strategy.extended.reducer
        self._optimizer = optimizer
        self._layer_state: list[LocalView] = []
        #: By replica, the last step that was traced.
        self._reduced_in: dict[int, Step] = {}
        self.values = LocalValues(strategy.extended.worker_devices)

    def before_step(self, step: Step) -> None:
        """Call it outside of replicas."""
        self.values.settle()
        step.of(_LayerStateKept).update(map(id, self._layer_state))

    def keep_layer_state(self, variables: Sequence[Any]) -> None:
        """Gives the state of layers (moving statistics) local values, too."""
        known = set(map(id, self.values.variables))
        for variable in variables:
            if (
                isinstance(variable, LocalView)
                and id(variable) not in known
                and variable.dtype.is_floating
                and variable.aggregation == tf.VariableAggregation.NONE
            ):
                self.values.make(variable)
                self._layer_state.append(variable)
                self._make_room_for(variable)

    def _state_of_host(self) -> list[LocalView]:
        """All state that a joining host needs."""
        own = [variable.value for variable in self._optimizer.variables]
        found = [*self._weights, *self._layer_state]
        found += [variable for variable in own if isinstance(variable, LocalView)]
        return list({id(variable): variable for variable in found}.values())

    def _make_room_for(self, variable: LocalView) -> None:
        """Makes room for a variable that is kept; here nothing."""

    def reduced(self, own: Reduction, weight: tf.Tensor | None) -> list[Any]:
        """The gradients of the update that follows.

        Args:
          own: this replica's part of its group's mean gradient.
          weight: of the group's mean against other groups'; None: it is a sum.
        """
        raise NotImplementedError

    def synchronize_layer_state(self, step: Step, rank: int) -> None:
        """See `buffer_synchronization.synchronize_layer_state`; within the group."""
        state = self._take_state(step, rank)
        if state and step.group_size > 1:
            self._within_group(state, Reduction([], [], step, rank, self._optimizer))

    def _within_group(
        self, state: Sequence[LocalView], reduction: Reduction
    ) -> list[Any]:
        sums = Exact(self._reducer.within_hosts)
        return reduce(reduction, [GroupState(state)], sums)

    def _take_state(self, step: Step, rank: int) -> list[LocalView]:
        state = step.trace(rank).of(LocalState).take()
        for variable in state:
            if id(variable) not in step.of(_LayerStateKept):
                raise ConfigurationError(
                    f"A step stores into {variable.name!r}, which is no state of the "
                    "model's layers, and with sync=... replicas train locally: each "
                    "would store another value. Make it a weight of a layer "
                    "(add_weight(trainable=False)), or leave sync out."
                )
        return state

    def _refuse_second_update(self, step: Step, rank: int, what: str) -> None:
        """Call it once in each trace of `reduced`; `what`: of which a step has one."""
        before, self._reduced_in[rank] = self._reduced_in.get(rank), step
        if before is step:
            raise ConfigurationError(
                f"The optimizer {self._optimizer.name!r} is applied twice in a step, "
                f"and with sync={self._optimizer.sync!r} a step has one {what}. Apply "
                "all gradients together, or leave out sync."
            )

    def have_synchronized(self) -> bool:
        """Whether the weights outside of steps are those of the training."""
        return True

    def begin_epoch(self, model: Any) -> None:
        """Begins an epoch of `model`, before its steps; see `call_at_loops`."""

    def end_epoch(self) -> None:
        """Ends an epoch of any model, after its steps."""

    def end_fit(self) -> None:
        """Ends a `fit` that has made its last step without an error."""
        if self._elastic is not None:
            self._elastic.end_fit()

    def make_equal(self) -> None:
        """Gives all hosts the same weights; called between steps, on all hosts."""
