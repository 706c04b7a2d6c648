"""`auto_strategy`: picks the strategy for the hardware and cluster found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfdp.cluster import Cluster, find_cluster
from tfdp.cluster.tpu import find_tpu
from tfdp.errors import ConfigurationError
from tfdp.plan.communication import Communication, checked_communication
from tfdp.plan.options import (
    AUTO,
    HOSTS,
    TPU,
    Given,
    options_of,
    refuse_options,
    without_idle_options,
)
from tfdp.plan.shards import Sharding, sharding_of
from tfdp.strategies.data_parallel import DataParallelStrategy
from tfdp.strategies.devices import find_devices, first_devices, use_virtual_devices

if TYPE_CHECKING:
    from keras.distribution import LayoutMap, ModelParallel

    from tfdp.strategies.tpu import TPUDataParallelStrategy


def auto_strategy(
    *,
    cpu_devices: int | None = None,
    devices_per_host: int | None = None,
    communication: Communication | None = None,
    shard: str | int | Sharding = "none",
    shard_group: str = "all",
    shard_min_bytes: int = 32 * 1024,
    offload: str = "none",
    layout: LayoutMap | ModelParallel | None = None,
    draws_per_replica: bool = True,
    pad_batches: bool | int | None = None,
    wire_dtype: str | None = None,
    balance: str | None = None,
) -> DataParallelStrategy | TPUDataParallelStrategy:
    """The strategy for what this process finds: one script for all places.

    In one of several workers (`tfdp launch`, TF_CONFIG, Slurm, Kubernetes, MPI,
    torchrun) a `MultiHostDataParallelStrategy`; else, where the environment or a
    device file shows a TPU, a `TPUDataParallelStrategy`; else a `DataParallelStrategy`
    on all GPUs, or all logical CPUs if there is none. `print(strategy)` and the first
    `fit` of a job show which.

    Options between hosts have no effect on one host or a TPU, and the first `fit` says
    so: `balance`, `shard_group`, `sync` of `DistributedOptimizer`, and some of
    `Communication` (docs/options.md).

    Args:
      cpu_devices: without GPU, TPU and launcher, the number of logical CPUs to split
        the processor into, at least 1, one replica each; None leaves them unchanged.
        Ignored elsewhere.
      devices_per_host: replicas of each process, at least 1: GPUs, or logical CPUs if
        there is no GPU. None takes all.
      communication: how replicas and hosts exchange tensors; None for the defaults.
      shard: which state is split over the replicas (ZeRO stage): "none" (0),
        "optimizer" (1: its state), "gradients" (2: and gradients), "parameters"
        (3: and weights). Or a `tfdp.Sharding`.
      shard_group: which replicas share the shards: "all" of all hosts, which then need
        each other to read (or save) a whole variable; or those of each "host", so that
        every host has all shards and the network traffic is that without shards. No
        effect on one host.
      shard_min_bytes: variables below this size, in bytes, are not sharded.
      offload: "optimizer": the sharded optimizer state stays in host memory, where the
        CPU updates it; see docs/sharding.md#offload. "none": on the devices.
      layout: a `LayoutMap` or `ModelParallel` of `keras.distribution`: its mesh has one
        device per replica, and its rules say which axes cut which weights; see
        docs/axes.md. None takes the `ModelParallel` that
        `keras.distribution.set_distribution` was given, if any: else weights are whole.
      draws_per_replica: True: dropout, noise and augmentation layers draw differently
        on every replica, reproducibly from their seed. False: identical draws.
      pad_batches: True: short batches are padded with rows that have no effect, so that
        all have one size. A number is the global batch size, for data that do not
        state it. False: no padding. None: padding on a TPU only.
      wire_dtype: the type of gradients between the cores of a TPU: "bfloat16" halves
        their bytes, rounded to 8 bits; None does not round.
      balance: "speed": each host takes rows of the global batch in proportion to its
        measured speed, so that all end a step together. None: equal parts.

    Raises:
      ClusterError: for an incomplete or contradictory cluster in the environment.
      ConfigurationError: for a bad option, or one without effect here
        (docs/options.md), or if `cpu_devices` and `devices_per_host` differ.
      DeviceError: if there are fewer GPUs than `devices_per_host`, or TensorFlow has
        started with another number of logical CPUs.
      TPUError: if there are signs of a TPU that cannot be used, with what to do.

    ```python
    import tfdp

    strategy = tfdp.auto_strategy(cpu_devices=2)
    print(strategy)
    ```
    """
    communication = checked_communication(communication)
    if layout is None:
        layout = given_distribution()
    sharding = sharding_of(
        shard, group=shard_group, min_bytes=shard_min_bytes, offload=offload
    )
    cluster = find_cluster()
    hosts = 1 if cluster is None else cluster.workers
    tpu = find_tpu() if hosts == 1 else None
    given, idle = without_idle_options(
        Given(
            HOSTS if hosts > 1 else AUTO if tpu is None else TPU,
            hosts,
            options_of(
                communication,
                sharding,
                layout=layout,
                draws_per_replica=draws_per_replica,
                pad_batches=pad_batches,
                wire_dtype=wire_dtype,
                balance=balance,
                devices_per_host=devices_per_host,
                cpu_devices=cpu_devices,
            ),
        )
    )
    refuse_options(given)
    fields = {name: given[f"Communication.{name}"] for name in vars(communication)}
    own = [name for name in given.values if given.has(name) and "." not in name]
    options = {name: given[name] for name in own if name != "cpu_devices"}
    options["communication"] = Communication(**fields)
    if hosts > 1:
        from tfdp.strategies.multi_host import MultiHostDataParallelStrategy

        return MultiHostDataParallelStrategy(cluster, **options)
    strategy: DataParallelStrategy | TPUDataParallelStrategy
    if tpu is not None:
        from tfdp.strategies.tpu import TPUDataParallelStrategy

        strategy = TPUDataParallelStrategy(tpu.address, **options)
    else:
        count = options.pop("devices_per_host", None)
        devices = _own_devices(cluster, count, cpu_devices)
        strategy = DataParallelStrategy(devices, **options)
    strategy.idle_options = idle
    return strategy


def given_distribution() -> Any:
    """The `ModelParallel` that `set_distribution` was given; None: it was not."""
    given = keras.distribution.distribution()
    return given if isinstance(given, keras.distribution.ModelParallel) else None


def _own_devices(
    cluster: Cluster | None, devices_per_host: int | None, cpu_devices: int | None
) -> list[str] | None:
    """The devices of a single host; None: all of them."""
    count = devices_per_host
    if count is None and cluster is not None:
        count = cluster.devices_per_worker
    if not tf.config.list_physical_devices("GPU"):
        if None not in (cpu_devices, devices_per_host) and cpu_devices != count:
            raise ConfigurationError(
                f"auto_strategy(cpu_devices={cpu_devices}, "
                f"devices_per_host={devices_per_host}) gives two numbers of logical "
                "CPUs, as there is no GPU here. Leave one of them out, or give both "
                "the same number."
            )
        cpus = cpu_devices if count is None else count
        return None if cpus is None else use_virtual_devices(cpus)
    if count is None:
        return None
    return first_devices(count, find_devices(), f"{count} devices requested")
