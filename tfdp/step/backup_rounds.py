"""Steps for which the first gradients suffice: `tfdp.sync.BackupWorkers`.

Each update is a round of a quorum (`tfdp.hosts.elastic_quorum`), of gradients and of
the state of layers. A host that was late makes all updates that it missed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from keras.optimizers import Optimizer

from tfdp._private.names import own_copy
from tfdp._private.optimizer_hooks import rate_variable
from tfdp.chain.reduction import Reduction, reduce
from tfdp.chain.stages import chain_of
from tfdp.errors import ConfigurationError
from tfdp.exchange.elastic_pipeline import ElasticPipeline
from tfdp.exchange.reducer import Reducer
from tfdp.hosts.quorum_values import QuorumRules
from tfdp.plan.options import refuse_options
from tfdp.step.buffer_synchronization import synchronize_layer_state
from tfdp.step.elastic_rounds import ElasticRounds, for_each_round
from tfdp.step.local_training import LocalTraining
from tfdp.sync.backup_workers import BackupWorkers
from tfdp.tracing.step import Step
from tfdp.tracing.stored_state import LocalState, StoredState
from tfdp.variables.local_view import LocalView

# Each costs a copy of the gradients in host memory.
KEPT_ROUNDS = 8


class HostSums:
    """The sums over the replicas of this host."""

    def __init__(self, pipeline: ElasticPipeline):
        self._pipeline = pipeline

    def sum_gradients(
        self, gradients: Any, riders: Any, rank: Any, **options: bool
    ) -> tuple[list[Any], list[tf.Tensor]]:
        return Reducer.sum_gradients(self._pipeline, gradients, riders, rank, **options)


class BackupRounds(LocalTraining):
    """The sums and updates of one optimizer.

    Args:
      updates: counts the sums that were applied, equal on all replicas.
    """

    _elastic: ElasticRounds

    def __init__(
        self,
        sync: BackupWorkers,
        strategy: tf.distribute.Strategy,
        optimizer: Optimizer,
        weights: Sequence[LocalView],
        updates: LocalView,
    ):
        self._pipeline = strategy.extended.reducer
        self._rules = rules_of(sync, strategy)
        devices = strategy.extended.worker_devices
        super().__init__(strategy, len(devices), optimizer)
        self._weights, self._updates = weights, updates
        self._elastic = ElasticRounds(self._pipeline, devices, self._state_of_host)
        self._run: Step | None = None
        #: By rank, in the trace: the means to apply, and the state at their end.
        self._due: dict[Any, tuple[list[tf.Tensor], list[LocalView]]] = {}

    @property
    def _rate(self) -> LocalView | None:
        """The learning rate, which callbacks may set on each host at another update:
        all hosts use the mean of those that came. None: a schedule's."""
        inner = getattr(self._optimizer, "inner_optimizer", self._optimizer)
        rate = rate_variable(inner)
        return rate if isinstance(rate, LocalView) else None

    def keep_layer_state(self, variables: Sequence[Any]) -> None:
        """The state of layers, which has no local values here."""
        self._layer_state = [one for one in variables if isinstance(one, LocalView)]
        moves = [one for one in self._layer_state if one.dtype.is_floating]
        if moves and getattr(self._optimizer, "accumulate_steps", 1) > 1:
            raise ConfigurationError(
                "sync=BackupWorkers(...) sends the state of layers with each update, "
                f"and with accumulate_steps {moves[0].name!r} moves in between. Leave "
                "out accumulate_steps, or use layers without such state."
            )

    def before_step(self, step: Step) -> None:
        if step.guard is not None or step.stages:
            raise ConfigurationError(
                "sync=BackupWorkers(...) does not go with callbacks that look into "
                "sums of gradients (NaNGuard, GradientNoiseScale, AdaScale): they "
                "count all hosts. Leave them out, or sync."
            )
        self._run = step
        step.of(StoredState).refuses_late = (
            "sync=BackupWorkers(...) sends the state of layers with the gradients, and "
            "this step stores {name!r} after its update. Store it before, or leave out "
            "sync."
        )
        self._elastic.before_step()

    def synchronize_layer_state(self, step: Step, rank: int) -> None:
        synchronize_layer_state(step, rank)

    def reduced(self, own: Reduction, weight: tf.Tensor | None) -> list[Any]:
        """The mean gradient over the hosts that came; this host may have been late."""
        rank = own.rank
        self._check(own.step, weight)
        gradients = [tf.convert_to_tensor(gradient) for gradient in own.gradients]
        state = own.step.trace(rank).of(LocalState).take()
        own.step.trace(rank).of(LocalState).put_back(state)
        own.gradients = list(gradients)
        sums = reduce(own, chain_of(own), HostSums(self._pipeline))
        values = [
            tf.ensure_shape(total, variable.shape)
            for total, variable in zip(sums, own.variables, strict=True)
        ]
        values += [own_copy(variable, rank).read_value() for variable in state]
        rate = self._rate
        if rate is not None:
            values.append(tf.reshape(own_copy(rate, rank).read_value(), [1]))
        self._pipeline.begin_quorum(self._rules, values)
        count = own_copy(self._updates, rank).read_value() + 1
        means, numbers = self._pipeline.meet_quorum(count, weight, values, rank)
        self._elastic.note_outcome(numbers[0], rank)
        self._due[rank] = means, state
        return gradients  # of this host, in the place of those of `around`

    def _check(self, step: Step, weight: tf.Tensor | None) -> None:
        if step is not self._run:
            raise ConfigurationError(
                f"The optimizer {self._optimizer.name!r} has sync=BackupWorkers(...), "
                "and its update is called outside of a Keras model's train_step, or it "
                "was not built before. Train with model.fit or train_on_batch, after "
                "optimizer.build(model.trainable_variables), or leave out sync."
            )
        if weight is None:
            raise ConfigurationError(
                "sync=BackupWorkers(...) makes means over the rows that counted, and "
                "the losses are sums over rows (reduction='sum'). Use means."
            )

    def around(self, reduction: Reduction, update: Callable[[], Any]) -> None:
        """The updates that are due: usually one."""
        rank, gradients = reduction.rank, reduction.gradients
        places = [i for i, one in enumerate(gradients) if one is not None]
        means, state = self._due.pop(rank)

        def one(means: list[tf.Tensor]) -> None:
            for place, mean in zip(places, means, strict=False):
                gradients[place] = mean
            if self._rate is not None:
                own = own_copy(self._rate, rank)
                own.assign(tf.reshape(means[-1], own.shape))
            update()
            for variable, mean in zip(state, means[len(places) :], strict=False):
                own_copy(variable, rank).assign(mean)
            own_copy(self._updates, rank).assign_add(1)

        for_each_round(means, one)


def rules_of(sync: BackupWorkers, strategy: tf.distribute.Strategy) -> QuorumRules:
    """Raises ConfigurationError where hosts cannot be spared."""
    refuse_options(strategy.given.replace(sync=sync))
    hosts = strategy.extended.reducer.hosts.workers
    return QuorumRules(hosts - sync.spare, 0.0, 1, KEPT_ROUNDS)
