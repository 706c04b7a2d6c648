"""What a strategy of several hosts adds up and joins over all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp._private import names
from tfdp.exchange.host_group import HostGroup
from tfdp.strategies.replica_strategy import ReplicaContextStrategy
from tfdp.tracing.keras_steps import is_predict_step
from tfdp.tracing.run import ReplicaRun

__all__ = ["SumsOverHosts"]


class SumsOverHosts(ReplicaContextStrategy):
    """Reductions, rows and numbers of samples of all hosts; a mixin."""

    #: The hosts; None for one that is alone, which exchanges nothing.
    _group: HostGroup | None = None
    #: Whether it is known that all hosts get as many rows: not where they train.
    _hosts_are_alike = False

    @property
    def hosts(self) -> int:
        """How many processes make each step together."""
        return 1

    def _reduce_values(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        """Reduces over the replicas of all hosts."""
        # The insides add up over hosts, as where TensorFlow asks them (`reduce_to`).
        group = self._group
        is_mean = str(getattr(reduce_op, "value", reduce_op)).upper() == "MEAN"
        if group is None or not is_mean or axis is None:
            return super()._reduce_values(reduce_op, value, axis)
        total = self._reduce_values("SUM", value, axis)
        counts = tf.nest.map_structure(
            lambda v: group.sum(self._local_length(v, axis)), value
        )
        return tf.nest.map_structure(
            lambda t, n: t / tf.cast(n, t.dtype), total, counts
        )

    def gather(self, value: Any, axis: int) -> Any:
        """Joins the values of all replicas by rank; see `tf.distribute.Strategy`."""
        local = super().gather(value, axis)
        group = self._group
        if group is None:
            return local
        return tf.nest.map_structure(lambda t: group.gather(t, axis), local)

    @property
    def _sum_of_logs(self) -> Callable[[tf.Tensor], tf.Tensor] | None:
        return None if self._group is None else self._group.sum

    def _local_length(self, value: Any, axis: int) -> tf.Tensor:
        parts = self.experimental_local_results(value)
        return tf.add_n([tf.cast(tf.shape(part)[axis], tf.int64) for part in parts])

    def _complete_run(self, run: ReplicaRun) -> None:
        """Counts the samples of all hosts, in cross-replica context."""
        # Where hosts train apart, the others' samples do not matter.
        if self._group is None or run.is_local:
            return
        run.replicas = self.num_replicas_in_sync
        if run.counts is not None:
            run.spans_hosts, run.hosts_are_alike = True, self._hosts_are_alike
            total = tf.cast(run.total, tf.int32)
            run.total = self._group.sum(total, "number of samples")

    def _of_all_hosts(self, vector: tf.Tensor) -> tf.Tensor:
        return vector if self._group is None else self._group.gather(vector)

    def _complete_result(self, fn: Callable, result: Any) -> Any:
        """All hosts' rows where Keras is about to join those of this host."""
        group = self._group
        if group is None or not is_predict_step(fn):
            return result
        return tf.nest.map_structure(lambda v: self._all_rows(v, group), result)

    def _all_rows(self, value: Any, group: HostGroup) -> Any:
        parts = self.experimental_local_results(value)
        if parts[0].shape.rank == 0:
            return value
        rows = group.gather(tf.concat(parts, axis=0))
        if len(parts) == 1:
            return rows
        return names.PerReplica((rows, *(part[:0] for part in parts[1:])))
