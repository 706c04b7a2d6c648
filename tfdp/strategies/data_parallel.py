"""`DataParallelStrategy`: makes `model.fit` data-parallel on one host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tfdp.cluster import find_cluster
from tfdp.errors import ClusterError, ConfigurationError
from tfdp.exchange.reducer import Reducer
from tfdp.plan.buckets import Bucket
from tfdp.plan.communication import (
    Communication,
    checked_communication,
    outside_replicas,
)
from tfdp.plan.options import ONE, Given, options_of, refuse_options
from tfdp.plan.shards import Sharding, sharding_of
from tfdp.plan.topology import Topology
from tfdp.strategies.devices import find_devices
from tfdp.strategies.extended import DataParallelExtended
from tfdp.strategies.hierarchical import HierarchicalAllReduce
from tfdp.strategies.keras_backend import check_keras_backend
from tfdp.strategies.replica_strategy import ReplicaContextStrategy
from tfdp.strategies.startup_checks import check_versions
from tfdp.strategies.unused import note_made

if TYPE_CHECKING:
    from keras.distribution import LayoutMap, ModelParallel


class DataParallelStrategy(ReplicaContextStrategy, tf.distribute.MirroredStrategy):
    """Trains one model on all devices of this host, each on its part of the batch.

    With n_r of the n rows of a batch on replica r, and its mean loss L_r over them, one
    step computes

        g = sum_r (n_r / n) grad L_r(w),    w <- update(w, g)

    identically on every replica. To Keras and TensorFlow it is a
    `tf.distribute.MirroredStrategy`, but gradients are reduced and applied within each
    replica, in buckets, while backprop still runs.

    Args:
      devices: names of the devices, one replica each, such as `["GPU:0", "GPU:1"]`;
        None takes all GPUs, or all logical CPUs if there is no GPU.
      communication: see `auto_strategy`.
      shard: see `auto_strategy`.
      shard_min_bytes: see `auto_strategy`.
      offload: see `auto_strategy`.
      layout: see `auto_strategy`.
      draws_per_replica: see `auto_strategy`.
      pad_batches: see `auto_strategy`; `jit_compile=True` then compiles once.
      alone: True: each worker of a launcher trains its own model. False: refused there;
        `tfdp.auto_strategy` trains one model on all workers.

    Raises:
      ConfigurationError: for an argument that is bad or has no effect on one host
        (docs/options.md), in one of several workers, or if Keras' backend is not
        TensorFlow.
      DeviceError: if a device does not exist or is given twice.

    Cost: per step and replica about 2 n (N - 1) / N bytes for n bytes of gradients;
    3 n (N - 1) / N with shard="parameters" and `tfdp.remat`.

    ```python
    import keras
    import tfdp

    strategy = tfdp.DataParallelStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
    ```
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
        communication: Communication | None = None,
        shard: str | int | Sharding = "none",
        shard_min_bytes: int = 32 * 1024,
        offload: str = "none",
        layout: LayoutMap | ModelParallel | None = None,
        draws_per_replica: bool = True,
        pad_batches: bool | int | None = None,
        alone: bool = False,
    ):
        check_keras_backend()
        check_versions()
        if not alone:
            refuse_among_workers()
        communication = checked_communication(communication, layout)
        sharding = sharding_of(shard, min_bytes=shard_min_bytes, offload=offload)
        options = options_of(
            communication,
            sharding,
            layout=layout,
            draws_per_replica=draws_per_replica,
            pad_batches=pad_batches,
        )
        self.given = Given(ONE, 1, options)
        refuse_options(self.given)
        self.pad_batches = pad_batches or False
        if devices is None and layout is not None:
            from tfdp.grid.layouts import devices_of

            devices = devices_of(layout)
        self._extend(find_devices(devices), communication)

    def _extend(self, devices: tuple[str, ...], communication: Communication) -> None:
        """Makes this TensorFlow's strategy of these devices."""
        within_host = outside_replicas(communication, self.cluster.workers)
        cross_device_ops = HierarchicalAllReduce(within_host)
        extended = self._make_extended(devices, communication, cross_device_ops)
        # MirroredStrategy's own constructor would make a stock extended.
        tf.distribute.Strategy.__init__(self, extended)
        note_made(self, self.is_chief)

    def _make_extended(
        self,
        devices: tuple[str, ...],
        communication: Communication,
        cross_device_ops: HierarchicalAllReduce,
    ) -> DataParallelExtended:
        outside = cross_device_ops.reducer(devices)
        reducer = self.reducer_within(outside, communication)
        return DataParallelExtended(self, devices, reducer, cross_device_ops)

    def reducer_within(self, outside: Reducer, communication: Communication) -> Reducer:
        """The reducer within replicas, given the one that reduces outside them."""
        if communication.compression is None:
            return outside
        return Reducer(outside.transport, communication)

    def from_chief(self, value: np.ndarray, label: str = "value") -> np.ndarray:
        """The first host's array, on every host; all of them must call it."""
        return value

    @property
    def communication(self) -> Communication:
        return self.extended.reducer.communication

    @property
    def topology(self) -> Topology:
        """The levels over which gradients are reduced."""
        return self.extended.reducer.transport.topology

    def plan(self, gradients: Sequence[tf.Tensor]) -> tuple[Bucket, ...]:
        """The buckets for `gradients`, in the order of their exchanges."""
        return self.extended.reducer.plan(gradients)


def refuse_among_workers() -> None:
    """Refuses a strategy of one process if a launcher has started several."""
    try:
        cluster = find_cluster()
    except ClusterError:
        return  # unknown: a batch script without its job step, perhaps
    if cluster is not None and cluster.workers > 1:
        raise ConfigurationError(
            f"This process is worker {cluster.rank} of {cluster.workers} "
            f"({cluster.source}), and a DataParallelStrategy trains on one host. Use "
            "tfdp.auto_strategy() or tfdp.MultiHostDataParallelStrategy() to train one "
            "model on all workers, DataParallelStrategy(alone=True) for one on each."
        )
