"""Devices: how many there are, which to train on, and logical CPUs for laptops."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Sequence

import tensorflow as tf

from tfdp.checks import is_whole
from tfdp.cluster.machine import restart_in_words, usable_cores
from tfdp.cluster.nvidia import driver_gpus, explain_unseen_gpus
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
      ConfigurationError: when `count` is not as above.
      DeviceError: when TensorFlow has already started with another number.

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
            "it before the first tensor, model or strategy is made (right after the "
            f"imports).{restart_in_words()}"
        ) from error
    return names


def add_waiting_thread() -> None:
    """Gives TensorFlow one thread more than backprop keeps busy.

    An exchange between hosts holds one while it waits for the network. By default there
    are as many as cores. Where replicas share cores each of them needs one: a thread
    goes down a chain of gradients and leaves those of weights for later, so that with
    too few the first gradients come last, and no exchange is hidden. Nothing is
    changed where the number was set, or TensorFlow has started already.
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
    """What to do about GPUs that the driver sees and TensorFlow does not.

    None: there are none.
    """
    return explain_unseen_gpus(
        driver_gpus(),
        len(tf.config.list_physical_devices("GPU")),
        built_with_cuda=tf.test.is_built_with_cuda(),
        environment=os.environ,
    )


@functools.cache
def _warn_of_unseen_gpus() -> None:
    said = unseen_gpus()
    if said is not None:
        warnings.warn(said, DeviceWarning, stacklevel=4)


def first_devices(count: int | None, found: Sequence[str], asked: str) -> list[str]:
    """So many of the devices that were found; None: all of them.

    Args:
      asked: what asks for so many, in words.

    Raises:
      DeviceError: there are fewer.
    """
    if count is not None and len(found) < count:
        raise DeviceError(
            f"{asked}, but this host has {len(found)}: {', '.join(found)}. Ask for as "
            "many as there are, or leave it out to use all."
        )
    return list(found[:count])


def find_devices(devices: Sequence[str] | None = None) -> tuple[str, ...]:
    """Full names of the devices to train on, one per replica.

    Args:
      devices: names such as "GPU:0" or "/device:CPU:1"; None takes all GPUs, or all
        logical CPUs where there is no GPU.

    Raises:
      DeviceError: when a name is unknown, or stands there twice.
      ConfigurationError: when `devices` is empty or not a list of names.
    """
    present = [
        device
        for kind in ("GPU", "CPU")
        for device in tf.config.list_logical_devices(kind)
    ]
    if devices is None:
        _warn_of_unseen_gpus()
        gpus = [d.name for d in present if d.device_type == "GPU"]
        chosen = gpus or [d.name for d in present if d.device_type == "CPU"]
        return tuple(_full_name(name) for name in chosen)
    is_names = isinstance(devices, (list, tuple)) and all(
        isinstance(name, str) for name in devices
    )
    if not is_names or not devices:
        raise ConfigurationError(
            "devices must be None or a non-empty list of device names such as "
            f"['GPU:0', 'GPU:1']. Received: {devices!r}."
        )
    known = {_full_name(device.name) for device in present}
    full_names = tuple(_full_name(name) for name in devices)
    for given, name in zip(devices, full_names, strict=True):
        if name not in known:
            short = sorted(n.rsplit("device:", 1)[1] for n in known)
            raise DeviceError(
                f"There is no device {given!r}. Present: {', '.join(short)}. For more "
                "logical CPUs call tfdp.use_virtual_devices(n) before TensorFlow "
                f"starts.{restart_in_words()}"
            )
    if len(set(full_names)) != len(full_names):
        raise DeviceError(
            f"A device stands twice in devices={list(devices)}. Each replica needs a "
            "device of its own."
        )
    return full_names


def _full_name(name: str) -> str:
    try:
        spec = tf.DeviceSpec.from_string(name if "/" in name else f"/device:{name}")
    except (ValueError, TypeError) as error:
        raise DeviceError(
            f"{name!r} is not a device name. Write for example 'GPU:0' or 'CPU:1'."
        ) from error
    # This process has another name than "localhost" among TensorFlow's collectives.
    base = tf.DeviceSpec.from_string(tf.config.list_logical_devices("CPU")[0].name)
    kind = (spec.device_type or "CPU").upper()
    return base.replace(
        device_type=kind, device_index=spec.device_index or 0
    ).to_string()
