"""The extended object of one host among several: it drives its own devices only.

For TensorFlow this is a mirrored strategy on this host's devices; ranks, and initial
values of variables, are those of all hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp._private.names import MirroredVariable, regroup_mirrored
from tfdp.exchange.host_group import HostGroup
from tfdp.strategies.extended import DataParallelExtended


class MultiHostExtended(DataParallelExtended):
    """`DataParallelExtended` of one host among several.

    `first_host_value`: returns the first host's array, given this host's and a label.
    """

    is_of_one_host = False

    def __init__(
        self,
        *args: Any,
        first_rank: int,
        first_host_value: Callable[[np.ndarray, str], np.ndarray],
        group: HostGroup,
        **kwargs: Any,
    ):
        self.first_rank = first_rank
        # Random draws are independent over the replicas of all hosts.
        self.first_draw = first_rank
        self._first_host_value = first_host_value
        self._host_group = group
        super().__init__(*args, **kwargs)

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return self.first_rank + replica_id

    def _experimental_distribute_values_from_function(self, value_fn: Callable) -> Any:
        # TensorFlow counts only this host's replicas.
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
        """Reduces over the replicas of all hosts, in cross-replica context."""
        local = super().reduce_to(reduce_op, value, destinations, options)
        is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
        return tf.nest.map_structure(lambda v: self._of_all_hosts(v, is_mean), local)

    def _of_all_hosts(self, local: Any, is_mean: bool) -> Any:
        """The sum, or mean, over the hosts, of each host's result."""
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
        """A replica's `all_gather`: over this host's replicas, then over hosts."""
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
        return [
            self.reduce_to(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def _rows_of_hosts(self, own: tf.IndexedSlices, divisor: int) -> tf.IndexedSlices:
        values = self._host_group.gather(own.values)
        if divisor > 1:
            values /= divisor
        indices = self._host_group.gather(own.indices)
        return tf.IndexedSlices(values, indices, own.dense_shape)

    def _copied(self, value: Any) -> Any:
        """`value` (a tensor, an array or slices) on every device of this host."""
        copies = []
        for device in self.worker_devices:
            with tf.device(device):
                copies.append(tf.identity(value))
        return regroup_mirrored(copies)

    def _start_in_a_trace(self, kwargs: dict[str, Any]) -> Callable[[], tf.Tensor]:
        """The first host's initial value for a variable; a trace cannot exchange it."""
        with tf.init_scope():
            initial, label = kwargs["initial_value"](), f"variable {kwargs.get('name')}"
            mine = tf.convert_to_tensor(initial, dtype=kwargs.get("dtype"))
            first = self._first_host_value(mine.numpy(), label)
        return lambda: tf.constant(first)

    def common_start(self, value: tf.Tensor, kwargs: dict[str, Any]) -> tf.Tensor:
        if not tf.executing_eagerly():
            return value  # common already, by `_start_in_a_trace`
        label = f"variable {kwargs.get('name')}"
        with tf.device(self.start_device):
            return tf.constant(self._first_host_value(value.numpy(), label))

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        if not tf.executing_eagerly() and callable(kwargs.get("initial_value")):
            kwargs["initial_value"] = self._start_in_a_trace(kwargs)
        variable = super()._create_variable(next_creator, **kwargs)
        # Variables that are read as sums (metrics) start at zero everywhere.
        if isinstance(variable, MirroredVariable) and tf.executing_eagerly():
            mine = variable.values[0].numpy()
            first = self._first_host_value(mine, f"variable {variable.name}")
            for component in variable.values:
                component.assign(first)
        return variable
