"""The strategy's inside on several hosts: each drives its own devices alone.

TensorFlow sees a mirrored strategy on this host's devices; ranks, and the values that
variables start from, are those of all hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfdp._private.names import MirroredVariable, regroup_mirrored
from tfdp.exchange.host_group import HostGroup
from tfdp.exchange.sparse import join_rows
from tfdp.exchange.wire_types import check_summable
from tfdp.strategies.extended import DataParallelExtended


class FirstHostValue(Protocol):
    """Hands the first host's array to every host."""

    def __call__(self, value: np.ndarray, label: str) -> np.ndarray:
        """The array of host 0, in the shape and type of `value`."""


class MultiHostExtended(DataParallelExtended):
    """`DataParallelExtended` of one host among several.

    Args:
      first_rank: the rank of this host's first replica among all.
      first_host_value: brings variables to the value that host 0 gave them.
      group: sums and joins over hosts.
    """

    is_of_one_host = False

    def __init__(
        self,
        *args: Any,
        first_rank: int,
        first_host_value: FirstHostValue,
        group: HostGroup,
        **kwargs: Any,
    ):
        self.first_rank = first_rank
        # The replicas of all hosts draw apart, not those of each host.
        self.first_draw = first_rank
        self._first_host_value = first_host_value
        self._host_group = group
        super().__init__(*args, **kwargs)

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return self.first_rank + replica_id

    def _experimental_distribute_values_from_function(self, value_fn: Callable) -> Any:
        # TensorFlow's own counts the replicas of this host only.
        def value_of(local: tf.distribute.experimental.ValueContext) -> Any:
            rank = self.first_rank + local.replica_id_in_sync_group
            replicas = self._container_strategy().num_replicas_in_sync
            return value_fn(tf.distribute.experimental.ValueContext(rank, replicas))

        return super()._experimental_distribute_values_from_function(value_of)

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return replica_id_in_sync_group - self.first_rank

    def reduce_to(
        self, reduce_op: Any, value: Any, destinations: Any, options: Any = None
    ) -> Any:
        """The sum or mean over the replicas of all hosts, where they stop for each
        other; see `tf.distribute.StrategyExtended.reduce_to`."""
        local = super().reduce_to(reduce_op, value, destinations, options)
        is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
        return tf.nest.map_structure(
            lambda part: self._of_all_hosts(part, is_mean), local
        )

    def _of_all_hosts(self, local: Any, is_mean: bool) -> Any:
        """The sum over the hosts of what each has found over its replicas; the mean."""
        strategy = self._container_strategy()
        own = strategy.experimental_local_results(local)[0]
        hosts = strategy.hosts if is_mean else 1
        if isinstance(own, tf.IndexedSlices):
            return self._copied(self._rows_of_hosts(own, hosts))
        total = self._host_group.sum(tf.convert_to_tensor(own))
        return self._copied(total / hosts if is_mean else total)

    def _batch_gather_to(
        self, value_destination_pairs: Any, axis: int, options: Any = None
    ) -> list[Any]:
        """A replica's `all_gather`: first over the replicas of this host."""
        strategy = self._container_strategy()
        wholes = []
        for local in super()._batch_gather_to(value_destination_pairs, axis, options):
            own = strategy.experimental_local_results(local)[0]
            whole = self._host_group.gather(tf.convert_to_tensor(own), axis)
            wholes.append(self._copied(whole))
        return wholes

    def _batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Any, options: Any = None
    ) -> list[Any]:
        """Eager replicas stop for each other; then the sum over hosts is taken."""
        strategy = self._container_strategy()
        if not tf.executing_eagerly():
            return [
                self.reduce_to(reduce_op, value, destinations, options)
                for value, destinations in value_destination_pairs
            ]
        parts = [
            strategy.experimental_local_results(value)
            for value, _ in value_destination_pairs
        ]
        is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
        totals: list[Any] = [None] * len(parts)
        rows = [
            place
            for place, own in enumerate(parts)
            if all(isinstance(part, tf.IndexedSlices) for part in own)
        ]
        for place in rows:
            totals[place] = self._all_rows(parts[place], is_mean)
        dense = [place for place in range(len(parts)) if place not in rows]
        sums = self._host_group.sum_arrays(
            [
                _sum_of([tf.convert_to_tensor(part).numpy() for part in parts[place]])
                for place in dense
            ],
            "eager sum",
        )
        for place, total in zip(dense, sums, strict=True):
            # As in a graph, where the mean of whole numbers is a float64.
            mean = total / strategy.num_replicas_in_sync if is_mean else total
            totals[place] = self._copied(mean)
        return totals

    def _all_rows(self, parts: Sequence[tf.IndexedSlices], is_mean: bool) -> Any:
        """The rows of a table that the replicas of all hosts have, in rank order.

        Not their sum: an optimizer that squares or clips rows does so one by one.
        """
        own = join_rows(list(parts), summed=False)
        replicas = self._container_strategy().num_replicas_in_sync if is_mean else 1
        return self._copied(self._rows_of_hosts(own, replicas))

    def _rows_of_hosts(self, own: tf.IndexedSlices, divisor: int) -> tf.IndexedSlices:
        values = self._host_group.gather(own.values)
        if divisor > 1:
            values /= divisor
        indices = self._host_group.gather(own.indices)
        return tf.IndexedSlices(values, indices, own.dense_shape)

    def _copied(self, value: Any) -> Any:
        """`value`, a tensor, an array or rows, on every device of this host."""
        copy = _copy_of_rows if isinstance(value, tf.IndexedSlices) else tf.identity
        copies = []
        for device in self.worker_devices:
            with tf.device(device):
                copies.append(copy(value))
        return regroup_mirrored(copies)

    def _start_in_a_trace(self, kwargs: dict[str, Any]) -> Callable[[], tf.Tensor]:
        """The first host's start of a variable that is made while a step is traced.

        Hosts draw it apart, and what a trace assigns no host can ask another for.
        """
        with tf.init_scope():
            mine = tf.convert_to_tensor(
                kwargs["initial_value"](), dtype=kwargs.get("dtype")
            )
            first = self._first_host_value(
                mine.numpy(), f"variable {kwargs.get('name')}"
            )
        return lambda: tf.constant(first)

    def _common_start(self, value: tf.Tensor, kwargs: dict[str, Any]) -> tf.Tensor:
        if not tf.executing_eagerly():
            return value  # common already: see `_start_in_a_trace`
        label = f"variable {kwargs.get('name')}"
        return tf.constant(self._first_host_value(value.numpy(), label))

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        if not tf.executing_eagerly() and callable(kwargs.get("initial_value")):
            kwargs["initial_value"] = self._start_in_a_trace(kwargs)
        variable = super()._create_variable(next_creator, **kwargs)
        # Values that are read as sums (metrics) start at zero everywhere.
        if isinstance(variable, MirroredVariable) and tf.executing_eagerly():
            mine = variable.values[0].numpy()
            first = self._first_host_value(mine, f"variable {variable.name}")
            for component in variable.values:
                component.assign(first)
        return variable


def _copy_of_rows(rows: tf.IndexedSlices) -> tf.IndexedSlices:
    return tf.IndexedSlices(
        tf.identity(rows.values), tf.identity(rows.indices), rows.dense_shape
    )


def _sum_of(parts: Sequence[np.ndarray]) -> np.ndarray:
    check_summable(tf.as_dtype(parts[0].dtype))
    # np.sum would make int64 of every smaller whole number.
    return np.sum(parts, axis=0, dtype=parts[0].dtype)
