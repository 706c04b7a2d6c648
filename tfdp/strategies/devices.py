"""Devices to train on, and logical CPUs for laptops."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Sequence

import tensorflow as tf

from tfdp.checks import is_whole
from tfdp.cluster import find_cluster
from tfdp.cluster.machine import notebook_restart_hint, usable_cores
from tfdp.errors import ConfigurationError, DeviceError, DeviceWarning

MOST_VIRTUAL_DEVICES = 1024


def use_virtual_devices(count: int) -> list[str]:
    """Splits the CPU into `count` logical devices, for laptops and tests.

    Call it before anything else touches TensorFlow: devices are fixed when its
    runtime starts.

    Args:
      count: number of logical CPUs, 1 to 1024: TensorFlow starts threads for each.

    Returns:
      Their names, `["CPU:0", "CPU:1", ...]`.

    Raises:
      ConfigurationError: for a bad `count`.
      DeviceError: if TensorFlow has already started with another number.

    ```python
    import tfdp

    tfdp.use_virtual_devices(2)
    strategy = tfdp.DataParallelStrategy()
    ```
    """
    if not is_whole(count, least=1) or count > MOST_VIRTUAL_DEVICES:
        raise ConfigurationError(
            f"use_virtual_devices needs an integer from 1 to {MOST_VIRTUAL_DEVICES}. "
            f"Received: {count!r}."
        )
    names = [f"CPU:{i}" for i in range(count)]
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
        )
    except RuntimeError as error:
        present = len(tf.config.list_logical_devices("CPU"))
        if present == count:
            return names
        raise DeviceError(
            f"use_virtual_devices({count}) came too late: TensorFlow has already "
            f"started with {present} logical CPU(s), and devices are fixed then. Call "
            "it before creating a tensor, model or strategy (right after the "
            f"imports).{notebook_restart_hint()}"
        ) from error
    return names


def add_waiting_thread() -> None:
    """Gives TensorFlow one inter-op thread more than backprop uses.

    An exchange between hosts blocks one while it waits for the network. The default is
    one per core. Replicas that share cores need one each: a thread follows a chain of
    gradients and leaves those of weights for later, so with too few threads the first
    gradients come last, and no exchange overlaps. Changes nothing if the number is set
    or TensorFlow has started.
    """
    threading = tf.config.threading
    is_set = threading.get_inter_op_parallelism_threads() != 0
    if is_set or "TF_NUM_INTEROP_THREADS" in os.environ:
        return
    cpu = tf.config.list_physical_devices("CPU")[0]
    replicas = len(tf.config.get_logical_device_configuration(cpu) or [cpu])
    with contextlib.suppress(RuntimeError):
        busy = max(usable_cores(), replicas)
        threading.set_inter_op_parallelism_threads(busy + 1)


def unseen_gpus() -> str | None:
    """A message about GPUs that the driver sees and TensorFlow does not, or None."""
    from tfdp.cluster.nvidia import driver_gpus, explain_unseen_gpus

    return explain_unseen_gpus(
        driver_gpus(),
        len(tf.config.list_physical_devices("GPU")),
        built_with_cuda=tf.test.is_built_with_cuda(),
        environment=os.environ,
    )


@functools.cache
def _warn_of_unseen_gpus() -> None:
    message = unseen_gpus()
    if message is not None:
        warnings.warn(message, DeviceWarning, stacklevel=4)


def first_devices(count: int | None, found: Sequence[str], request: str) -> list[str]:
    """The first `count` devices; None: all. `request`: quoted in the error."""
    if count is not None and len(found) < count:
        raise DeviceError(
            f"{request}, but this host has {len(found)}: {', '.join(found)}. Request "
            "at most that number, or leave it out to use all."
        )
    return list(found[:count])


def find_devices(devices: Sequence[str] | None = None) -> tuple[str, ...]:
    """Full names of the devices to train on, one per replica.

    `devices`: such as "GPU:0" or "/device:CPU:1"; None takes all GPUs, or all logical
    CPUs if there is no GPU.
    """
    gpus, cpus = map(tf.config.list_logical_devices, ("GPU", "CPU"))
    if devices is None:
        _warn_of_unseen_gpus()
        return tuple(_full_name(device.name) for device in gpus or cpus)
    is_names = isinstance(devices, (list, tuple)) and all(
        isinstance(name, str) for name in devices
    )
    if not is_names or not devices:
        raise ConfigurationError(
            "devices must be None or a non-empty list of device names such as "
            f"['GPU:0', 'GPU:1']. Received: {devices!r}."
        )
    present = {_full_name(device.name) for device in [*gpus, *cpus]}
    full_names = tuple(_full_name(name) for name in devices)
    for given, name in zip(devices, full_names, strict=True):
        if name not in present:
            short = sorted(n.rsplit("device:", 1)[1] for n in present)
            raise DeviceError(
                f"There is no device {given!r}. Present: {', '.join(short)}. For more "
                "logical CPUs call tfdp.use_virtual_devices(n) before TensorFlow "
                f"starts.{notebook_restart_hint()}"
            )
    if len(set(full_names)) != len(full_names):
        raise DeviceError(
            f"A device is repeated in devices={list(devices)}. Each replica needs its "
            "own device."
        )
    return full_names


def devices_of_job(kind: str | None) -> list[str]:
    """The devices of all workers, as Keras names them; starts no runtime.

    `kind`: "cpu" or "gpu"; None: GPUs, or CPUs if there is none.
    """
    physical = tf.config.get_visible_devices
    kind = kind or ("gpu" if physical("GPU") else "cpu")
    split = map(tf.config.get_logical_device_configuration, physical(kind.upper()))
    count, cluster = sum(len(parts or [None]) for parts in split), find_cluster()
    if count and cluster is not None:
        count = cluster.workers * (cluster.devices_per_worker or count)
    return [f"{kind}:{i}" for i in range(count)]


def _full_name(name: str) -> str:
    try:
        spec = tf.DeviceSpec.from_string(name if "/" in name else f"/device:{name}")
    except (ValueError, TypeError) as error:
        raise DeviceError(
            f"{name!r} is not a device name. Write for example 'GPU:0' or 'CPU:1'."
        ) from error
    # With TensorFlow's collectives the job is not called "localhost".
    base = tf.DeviceSpec.from_string(tf.config.list_logical_devices("CPU")[0].name)
    kind, index = (spec.device_type or "CPU").upper(), spec.device_index or 0
    return base.replace(device_type=kind, device_index=index).to_string()
