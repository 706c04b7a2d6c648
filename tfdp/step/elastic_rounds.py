"""Rounds of hosts that may die and come back: the meeting, and how a host comes in.

before a step   a host that has just begun, or was left out, waits for the state of a
                live peer and goes on with it; one that others wait for gives its own
a meeting       the mean over the hosts that are present; a host that was left out
                keeps what it has until it is given the state
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp._private.names import ResourceVariable
from tfdp.errors import ConfigurationError
from tfdp.exchange.elastic_pipeline import ElasticPipeline
from tfdp.hosts.elastic_group import LEFT_OUT, MET
from tfdp.sync.rounds import Sync
from tfdp.variables.local_view import LocalView

# Of a sync: what it must be here, and why.
ALLOWED = {
    "across": ("hosts", "replicas of one host live and die together"),
    "start_step": (0, "synchronous updates need all hosts in every step"),
    "fragments": (1, "a host comes in when all weights have met"),
    "overlap_steps": (0, "what is on its way could be lost with a host"),
    "mixing": (None, "a host comes in with the outer weights"),
    "compression": (None, "what a method keeps back is owed to the same hosts"),
}


class ElasticRounds:
    """What `Rounds` asks where hosts may die.

    Args:
      pipeline: to this host's replicas, and to the other hosts.
      devices: of the replicas.
      state: all variables that a host which comes in needs.
    """

    def __init__(
        self,
        pipeline: ElasticPipeline,
        devices: Sequence[str],
        state: Callable[[], Sequence[LocalView]],
    ):
        self._pipeline, self._devices, self._state = pipeline, devices, state
        with tf.init_scope(), tf.device(devices[0]):
            start = tf.constant(True)
            self._exchanges = ResourceVariable(start, trainable=False)

    def before_step(self) -> None:
        """Outside of replicas: gives or takes the state, where that is due."""

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

    def meet(
        self,
        count: tf.Tensor,
        values: Sequence[tf.Tensor],
        rank: int,
        move: Callable[[Sequence[tf.Tensor]], tf.Tensor],
    ) -> tf.Tensor:
        """In a replica, after an update with which a round ends.

        Args:
          count: of updates.
          values: what this host brings.
          rank: the calling replica.
          move: uses the means.
        """
        means, outcome = self._pipeline.meet(count, values, rank)
        if rank == 0:
            self._exchanges.assign(tf.not_equal(outcome, MET))
        return tf.cond(
            tf.not_equal(outcome, LEFT_OUT),
            lambda: move(means),
            lambda: tf.constant(False),
        )


def elastic_rounds(
    sync: Sync,
    strategy: tf.distribute.Strategy,
    state: Callable[[], Sequence[LocalView]],
) -> ElasticRounds | None:
    """Those of a strategy whose hosts may die; None: of any other.

    Raises:
      ConfigurationError: `sync` does not go with that.
    """
    reducer = strategy.extended.reducer
    if not isinstance(reducer, ElasticPipeline):
        return None
    for name, (allowed, why) in ALLOWED.items():
        value = getattr(sync, name, allowed)
        if value != allowed:
            raise ConfigurationError(
                f"{type(sync).__name__}({name}={value!r}) does not go with "
                f"Communication(min_hosts=...): {why}. Allowed there: {allowed!r}."
            )
    return ElasticRounds(reducer, strategy.extended.worker_devices, state)
