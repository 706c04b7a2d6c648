"""`HierarchicalAllReduce`: tfdp's reduction as a `CrossDeviceOps`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.names import common_devices, regroup_mirrored
from tfdp.exchange.choose_engine import make_transport
from tfdp.exchange.reducer import Reducer
from tfdp.plan.communication import Communication, checked_communication
from tfdp.plan.options import STOCK, Given, fields_of, refuse_options
from tfdp.plan.topology import Topology
from tfdp.strategies.devices import find_devices
from tfdp.tracing.trace_order import one_trace


# Only the reduction of a batch of gradients differs from ReductionToOneDevice.
class HierarchicalAllReduce(tf.distribute.ReductionToOneDevice):
    """The reduction of `DataParallelStrategy` for stock TensorFlow strategies.

    In a `tf.function` a batch of values is reduced bucket by bucket over the levels
    of `communication`; in eager mode, or with a destination on other devices, values
    are added on one device, without an exchange.

    Args:
      communication: bucket sizes, levels and engine; None for the defaults.

    Raises:
      ConfigurationError: for anything but a `tfdp.Communication`, for compression, for
        an option without effect on one host (docs/options.md), or, at the first
        reduction, for a hierarchy that does not fit the devices.

    Cost: as `DataParallelStrategy`; about 2 n (N - 1) / N bytes per replica for n
    bytes of gradients on N replicas.

    ```python
    import tensorflow as tf
    import tfdp

    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tfdp.HierarchicalAllReduce()
    )
    ```
    """

    def __init__(self, communication: Communication | None = None):
        super().__init__()
        self.communication = checked_communication(communication)
        refuse_options(Given(STOCK, 1, fields_of(self.communication)))
        self._reducers: dict[tuple[str, ...], Reducer] = {}

    def batch_reduce_implementation(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: Any,
    ) -> list[Any]:
        devices = common_devices(value_destination_pairs)
        if tf.executing_eagerly() or devices is None:
            return super().batch_reduce_implementation(
                reduce_op, value_destination_pairs, options
            )
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        by_rank = []
        reducer = self.reducer(devices)
        with one_trace(), reducer.transport.run():
            for rank, device in enumerate(devices):
                with tf.device(device):
                    mine = [value.values[rank] for value, _ in value_destination_pairs]
                    by_rank.append(reducer.all_reduce(mine, rank, mean=mean))
        return [regroup_mirrored(parts) for parts in zip(*by_rank, strict=True)]

    def reducer(self, devices: tuple[str, ...]) -> Reducer:
        """The reducer of `devices`, created once for each tuple of them."""
        if devices not in self._reducers:
            topology = self.communication.resolve_topology(Topology(1, len(devices)))
            transport = make_transport(
                find_devices(devices), topology, self.communication
            )
            self._reducers[devices] = Reducer(transport, self.communication)
        return self._reducers[devices]
