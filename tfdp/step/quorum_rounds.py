"""Outer steps for which a quorum of the hosts suffices: `DiLoCo(quorum=...)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp._private.names import ResourceVariable
from tfdp.errors import ConfigurationError
from tfdp.exchange.elastic_pipeline import ElasticPipeline
from tfdp.hosts.quorum_values import QuorumRules
from tfdp.step.elastic_rounds import ElasticRounds, State, for_each_round
from tfdp.sync.diloco import DiLoCo

# Each costs a copy of the weights in host memory.
KEPT_ROUNDS = 2

Skip = Callable[[tf.Tensor, int], None]


class QuorumElasticRounds(ElasticRounds):
    """The means are weighted by the rows that a host has read since its last round.

    A late host moves by the rounds that it missed, starts from there, and skips the
    updates that its peers have made meanwhile, so that it is in time for the next
    round: `skip` is called with their number.
    """

    def __init__(
        self,
        pipeline: ElasticPipeline,
        devices: Sequence[str],
        state: State,
        rules: QuorumRules,
        skip: Skip,
    ):
        super().__init__(pipeline, devices, state)
        self._rules, self._skip = rules, skip
        with tf.init_scope(), tf.device(devices[0]):
            self._rows = ResourceVariable(tf.constant(0.0), trainable=False)

    def note_rows(self, rows: tf.Tensor) -> None:
        with tf.device(self._devices[0]):
            self._rows.assign_add(rows)

    def synchronize(
        self,
        count: tf.Tensor,
        values: Sequence[tf.Tensor],
        rank: int,
        move: Callable[[Sequence[tf.Tensor]], tf.Tensor],
    ) -> tf.Tensor:
        self._pipeline.begin_quorum(self._rules, values)
        rows = self._rows.read_value() if rank == 0 else tf.constant(0.0)
        means, state = self._pipeline.meet_quorum(count, rows, values, rank)
        outcome, skipped = tf.unstack(state)
        self.note_outcome(outcome, rank)
        if rank == 0:
            with tf.control_dependencies([outcome]):
                self._rows.assign(tf.constant(0.0))
        for_each_round(means, move)
        self._skip(skipped, rank)
        return tf.constant(True)


def quorum_rounds(
    sync: DiLoCo,
    strategy: tf.distribute.Strategy,
    elastic: ElasticRounds | None,
    state: State,
    skip: Skip,
) -> ElasticRounds | None:
    """The rounds of a sync with a quorum; `elastic` itself if the quorum is all hosts.

    `skip`: called in a replica with a number of updates that this host leaves out.
    """
    pipeline = strategy.extended.reducer
    hosts = pipeline.hosts.workers
    quorum = sync.quorum or hosts
    timeout = pipeline.communication.timeout_seconds
    if sync.grace_seconds and (quorum == hosts or sync.grace_seconds >= timeout):
        raise ConfigurationError(
            "DiLoCo.grace_seconds must be below Communication(timeout_seconds="
            f"{timeout:g}), after which a host counts as lost, and is 0 where the "
            f"quorum is all {hosts} hosts: such a round has nothing to wait for. "
            f"Received: quorum={quorum}, grace_seconds={sync.grace_seconds:g}."
        )
    if quorum == hosts:
        return elastic
    rules = QuorumRules(quorum, sync.grace_seconds, sync.every, KEPT_ROUNDS)
    devices = strategy.extended.worker_devices
    return QuorumElasticRounds(pipeline, devices, state, rules, skip)
