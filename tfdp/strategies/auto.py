"""`auto_strategy`: picks the strategy for the hardware and cluster found."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdp.checks import check_one_of, is_whole
from tfdp.cluster import Cluster, find_cluster
from tfdp.cluster.tpu import find_tpu
from tfdp.errors import ConfigurationError
from tfdp.plan.communication import (
    Communication,
    IdleOptions,
    checked_communication,
    without_idle_options,
)
from tfdp.plan.shards import Sharding, sharding_of
from tfdp.strategies.data_parallel import DataParallelStrategy
from tfdp.strategies.devices import find_devices, first_devices, use_virtual_devices
from tfdp.strategies.startup_checks import BALANCES

if TYPE_CHECKING:
    from tfdp.strategies.tpu import TPUDataParallelStrategy

# Options that cannot take effect, by what was found, and why.
ON_ONE_HOST = {
    "wire_dtype": "it is the type of gradients between the cores of a TPU; nothing "
    "is rounded within a host"
}
ON_SEVERAL_HOSTS = {
    "wire_dtype": "it is the type of gradients between the cores of a TPU; between "
    "hosts it is communication=tfdp.Communication(wire_dtype=...)",
    "pad_batches": "hosts take short batches unpadded",
}
ON_A_TPU = {
    "shard_group": "one process drives all cores",
    "offload": "the cores keep their state",
    "devices_per_host": "the number of a TPU's cores is fixed",
}


def auto_strategy(
    *,
    cpu_devices: int | None = None,
    devices_per_host: int | None = None,
    communication: Communication | None = None,
    shard: str | int | Sharding = "none",
    shard_group: str = "all",
    shard_min_bytes: int = 32 * 1024,
    offload: str = "none",
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
    so: `wire_dtype`, `compression`, `min_hosts`, `checksum` and the engines "sockets"
    and "mpi" of `Communication`, `sync` of `DistributedOptimizer`, `balance`.

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
      shard_group: which replicas share the shards: "all" of all hosts, or those of each
        "host", so that every host has all shards and the network traffic is that
        without shards. No effect on one host.
      shard_min_bytes: variables below this size, in bytes, are not sharded.
      offload: "optimizer": the sharded optimizer state stays in host memory, where the
        CPU updates it. "none": on the devices.
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
    given: dict[str, Any] = {
        "communication": communication,
        "shard": shard,
        "shard_group": shard_group,
        "shard_min_bytes": shard_min_bytes,
        "offload": offload,
        "draws_per_replica": draws_per_replica,
        "pad_batches": pad_batches,
        "wire_dtype": wire_dtype,
        "devices_per_host": devices_per_host,
        "balance": balance,
    }
    options = {name: v for name, v in given.items() if not _is_default(name, v)}
    counts = {"cpu_devices": cpu_devices, "devices_per_host": devices_per_host}
    for name, number in counts.items():
        if number is not None and not is_whole(number, least=1):
            raise ConfigurationError(
                f"{name} must be an int of at least 1, or None. Received: {number!r}."
            )
    cluster = find_cluster()
    if cluster is not None and cluster.workers > 1:
        _refuse(options, ON_SEVERAL_HOSTS, f"{cluster.workers} hosts")
        from tfdp.strategies.multi_host import MultiHostDataParallelStrategy

        return MultiHostDataParallelStrategy(cluster, **options)
    rest, idle = without_idle_options(checked_communication(communication))
    if options.pop("balance", None) is not None:
        check_one_of("balance", balance, BALANCES)
        idle["balance"] = "there are no other hosts to share a batch with"
    tpu = find_tpu()
    if tpu is not None:
        return _on_tpu(tpu.address, options, rest, idle)
    _refuse(options, ON_ONE_HOST, "one host")
    # All replicas are on this host, so both groups of shards are equal.
    sharding = sharding_of(
        shard, group=shard_group, min_bytes=shard_min_bytes, offload=offload
    )
    for name in ("shard", "shard_group", "shard_min_bytes", "offload"):
        options.pop(name, None)
    options["shard"] = dataclasses.replace(sharding, group="all")
    devices = _own_devices(cluster, options.pop("devices_per_host", None), cpu_devices)
    options["communication"] = rest
    strategy = DataParallelStrategy(devices, **options)
    strategy.idle_options = IdleOptions("one host", idle)
    return strategy


def _on_tpu(
    address: Any, options: dict[str, Any], rest: Communication, idle: dict[str, str]
) -> TPUDataParallelStrategy:
    from tfdp.strategies.tpu import TPUDataParallelStrategy

    _refuse(options, ON_A_TPU, "a TPU")
    options["communication"] = _without_bounds(rest)
    strategy = TPUDataParallelStrategy(address, **options)
    strategy.idle_options = IdleOptions("a TPU", idle)
    return strategy


def _is_default(name: str, value: Any) -> bool:
    default = inspect.signature(auto_strategy).parameters[name].default
    # 0 is not False, and 1 not True: the strategy checks wrong types.
    return type(value) is type(default) and value == default


def _without_bounds(communication: Communication) -> Communication:
    """`communication` with default timeouts: TPU cores wait for no worker."""
    defaults = Communication()
    return dataclasses.replace(
        communication,
        timeout_seconds=defaults.timeout_seconds,
        silence_seconds=defaults.silence_seconds,
        compare_hosts=defaults.compare_hosts,
    )


def _refuse(options: dict[str, Any], reasons: dict[str, str], where: str) -> None:
    for name, why in reasons.items():
        if name in options:
            raise ConfigurationError(
                f"auto_strategy({name}={options[name]!r}) has no effect here, on "
                f"{where}: {why}. Leave it out."
            )


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
