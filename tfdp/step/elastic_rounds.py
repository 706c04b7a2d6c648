"""Outer steps with elastic hosts, which may die and rejoin.

Before a step, a host that joins, or was left out, waits for the state of a live peer
and adopts it. An outer step averages over the present hosts; a host that was left out
keeps its values until it gets the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.names import ResourceVariable
from tfdp.exchange.elastic_pipeline import ElasticPipeline
from tfdp.hosts.elastic_group import LEFT_OUT, MET
from tfdp.variables.local_view import LocalView

#: Returns all variables that a joining host needs.
State = Callable[[], Sequence[LocalView]]


class ElasticRounds:
    """The elastic part of `Rounds`."""

    def __init__(self, pipeline: ElasticPipeline, devices: Sequence[str], state: State):
        self._pipeline, self._devices, self._state = pipeline, devices, state
        with tf.init_scope(), tf.device(devices[0]):
            start = tf.constant(True)
            self._exchanges = ResourceVariable(start, trainable=False)

    def before_step(self) -> None:
        """Sends or receives the state, if due, outside of replicas."""

        def exchange() -> tf.Tensor:
            variables = self._state()
            mine = [variable.outer_copy(0).read_value() for variable in variables]
            values = self._pipeline.exchange_state(mine)
            for rank, device in enumerate(self._devices):
                with tf.device(device):
                    for variable, value in zip(variables, values, strict=True):
                        variable.outer_copy(rank).assign(value)
                        if variable.has_local:
                            variable.local_copy(rank).assign(value)
            self._exchanges.assign(False)
            return tf.constant(True)

        with tf.device(self._devices[0]):
            tf.cond(self._exchanges, exchange, lambda: tf.constant(False))

    def end_fit(self) -> None:
        """Ends `fit`: late hosts take this host's state, or it theirs."""

        def exchange() -> None:
            self._exchanges.assign(True)
            self.before_step()

        self._pipeline.hosts.end_fit(exchange)

    def note_rows(self, rows: tf.Tensor) -> None:
        """Notes how many rows this host reads; before a step, outside of replicas."""

    def note_outcome(self, outcome: tf.Tensor, rank: int) -> None:
        """Makes the state due before the next step, unless the outcome is `MET`."""
        if rank == 0:
            self._exchanges.assign(tf.not_equal(outcome, MET))

    def synchronize(
        self,
        count: tf.Tensor,
        values: Sequence[tf.Tensor],
        rank: int,
        move: Callable[[Sequence[tf.Tensor]], tf.Tensor],
    ) -> tf.Tensor:
        """Averages `values` over the present hosts, in a replica after an update that
        ends a round, and passes the means to `move`, unless this host was left out."""
        means, outcome = self._pipeline.meet(count, values, rank)
        self.note_outcome(outcome, rank)
        is_in = tf.not_equal(outcome, LEFT_OUT)
        return tf.cond(is_in, lambda: move(means), lambda: tf.constant(False))


def for_each_round(
    means: Sequence[tf.Tensor], apply: Callable[[list[tf.Tensor]], Any]
) -> None:
    """Calls `apply`, in a loop of the graph, for each round of stacked means."""

    def one(number: tf.Tensor) -> tuple[tf.Tensor]:
        apply([mean[number] for mean in means])
        return (number + 1,)

    rounds = tf.shape(means[0])[0]
    tf.while_loop(lambda number: number < rounds, one, (tf.constant(0),))


def elastic_rounds(
    strategy: tf.distribute.Strategy, state: State
) -> ElasticRounds | None:
    """The rounds of a strategy with elastic hosts; None: of one without."""
    reducer = strategy.extended.reducer
    if not isinstance(reducer, ElasticPipeline):
        return None
    return ElasticRounds(reducer, strategy.extended.worker_devices, state)
