"""`auto_strategy`: the strategy for what is there."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import tensorflow as tf

from tfdp.checks import is_whole
from tfdp.cluster import Cluster, find_cluster
from tfdp.cluster.tpu import find_tpu
from tfdp.errors import ConfigurationError
from tfdp.plan.communication import (
    Communication,
    checked_communication,
    without_idle_options,
)
from tfdp.plan.shards import Sharding, sharding_of
from tfdp.strategies.data_parallel import DataParallelStrategy
from tfdp.strategies.devices import (
    find_devices,
    first_devices,
    use_virtual_devices,
)
from tfdp.strategies.multi_host import MultiHostDataParallelStrategy
from tfdp.strategies.startup_checks import IdleOptions
from tfdp.strategies.tpu import TPUDataParallelStrategy

# What cannot act, by what was found, and why.
ON_ONE_HOST = {
    "wire_dtype": "it says how gradients travel between the cores of a TPU; nothing "
    "is rounded within a host",
}
ON_SEVERAL_HOSTS = {
    "wire_dtype": "it says how gradients travel between the cores of a TPU; between "
    "hosts it is communication=tfdp.Communication(wire_dtype=...)",
    "pad_batches": "hosts take short batches as they are",
}
ON_A_TPU = {
    "shard_group": "one process drives all cores",
    "offload": "the cores keep their state",
    "devices_per_host": "a TPU has the cores that it has",
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
) -> DataParallelStrategy | TPUDataParallelStrategy:
    """The strategy for what this process finds: one script for all places.

    In one of several workers (`tfdp launch`, TF_CONFIG, Slurm, Kubernetes, MPI,
    torchrun) a `MultiHostDataParallelStrategy`; else, where the environment or a
    device file speaks of a TPU, a `TPUDataParallelStrategy`; else all GPUs, or all
    logical CPUs where there is none, as a `DataParallelStrategy`. `print(strategy)`
    says which, and the first `fit` of a job does.

    Options that act between hosts only have no effect on one host or a TPU, and the
    first `fit` says so: `wire_dtype`, `compression`, `min_hosts`, `checksum` and the
    engines "sockets" and "mpi" of `Communication`, `sync` of `DistributedOptimizer`.

    Args:
      cpu_devices: on a machine without GPU and TPU and without a launcher, the logical
        CPUs to split the processor into, at least 1, one replica each; None leaves
        them as they are. Anywhere else it says nothing: workers take what
        `tfdp launch --devices-per-worker` says.
      devices_per_host: replicas of each process, at least 1: as many of the GPUs, or
        logical CPUs where there is none. None takes all.
      communication: how replicas and hosts exchange tensors; None for the defaults.
      shard: see `DataParallelStrategy`.
      shard_group: see `MultiHostDataParallelStrategy`; on one host both are the same.
      shard_min_bytes: see `DataParallelStrategy`.
      offload: see `DataParallelStrategy`.
      draws_per_replica: see `DataParallelStrategy`.
      pad_batches: see `DataParallelStrategy` and `TPUDataParallelStrategy`, whose
        default None takes.
      wire_dtype: see `TPUDataParallelStrategy`.

    Raises:
      ClusterError: when the environment names a cluster incompletely or contradicts
        itself.
      ConfigurationError: when an option is not as above, or cannot act on what was
        found (docs/options.md), or `cpu_devices` and `devices_per_host` say two numbers
        of logical CPUs.
      DeviceError: when there are fewer GPUs than `devices_per_host`, or TensorFlow has
        already started with another number of logical CPUs.
      TPUError: when there are signs of a TPU that cannot be used; it says which, and
        what to do.

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
    }
    options = {name: value for name, value in given.items() if _says(name, value)}
    for name, number in (
        ("cpu_devices", cpu_devices),
        ("devices_per_host", devices_per_host),
    ):
        if number is not None and not is_whole(number, least=1):
            raise ConfigurationError(
                f"{name} must be an int of at least 1, or None. Received: {number!r}."
            )
    cluster = find_cluster()
    if cluster is not None and cluster.workers > 1:
        _refuse(options, ON_SEVERAL_HOSTS, f"{cluster.workers} hosts")
        return MultiHostDataParallelStrategy(cluster, **options)
    rest, idle = without_idle_options(checked_communication(communication))
    tpu = find_tpu()
    if tpu is not None:
        _refuse(options, ON_A_TPU, "a TPU")
        options["communication"] = _without_bounds(rest)
        on_tpu = TPUDataParallelStrategy(tpu.address, **options)
        on_tpu.idle_options = IdleOptions("a TPU", idle)
        return on_tpu
    _refuse(options, ON_ONE_HOST, "one host")
    # All replicas are of this host, so both groups of shards are the same.
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


def _says(name: str, value: Any) -> bool:
    """Whether an option is not at its default, which says nothing."""
    default = inspect.signature(auto_strategy).parameters[name].default
    # 0 is no False, and 1 no True: what was given wrongly is for the strategy to say.
    return type(value) is not type(default) or value != default


def _without_bounds(communication: Communication) -> Communication:
    """The same with default bounds: the cores of a TPU wait for no worker."""
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
                f"auto_strategy({name}={options[name]!r}) cannot act here, on {where}: "
                f"{why}. Leave it out."
            )


def _own_devices(
    cluster: Cluster | None, devices_per_host: int | None, cpu_devices: int | None
) -> list[str] | None:
    """The devices of one host alone; None: all that there are."""
    count = devices_per_host
    if count is None and cluster is not None:
        count = cluster.devices_per_worker
    if not tf.config.list_physical_devices("GPU"):
        if None not in (cpu_devices, devices_per_host) and cpu_devices != count:
            raise ConfigurationError(
                f"auto_strategy(cpu_devices={cpu_devices}, "
                f"devices_per_host={devices_per_host}) says two numbers of logical "
                "CPUs, as there is no GPU here. Leave one of them out, or give both "
                "the same number."
            )
        cpus = cpu_devices if count is None else count
        return None if cpus is None else use_virtual_devices(cpus)
    if count is None:
        return None
    return first_devices(count, find_devices(), f"{count} devices were asked for")
