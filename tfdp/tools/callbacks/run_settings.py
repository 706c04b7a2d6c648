"""What a training is, in words for its record."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp._private.frames import fits_around
from tfdp.cluster.machine import describe_machine

__all__ = ["device_bytes", "devices_here", "machine_in_words", "settings_of"]

MOST_TEXT = 1000


def settings_of(model: keras.Model, params: Mapping[str, Any]) -> dict[str, str]:
    """Strategy, exchange, model, optimizer and batch, by name.

    Args:
      model: within its `fit`.
      params: what Keras tells callbacks of the `fit`.
    """
    strategy = model.distribute_strategy
    found: dict[str, Any] = {
        "strategy": repr(strategy) if _is_ours(strategy) else type(strategy).__name__,
        "communication": getattr(strategy, "communication", None),
        "shard": getattr(strategy, "shard", None),
        "model": f"{model.name}{_weights_in_words(model)}",
        "optimizer": _optimizer_in_words(model.optimizer),
        "loss": _name_of(model.loss),
        "dtype policy": model.dtype_policy.name,
        "batch": _batch_size(model),
        "steps per epoch": params.get("steps"),
        "epochs": params.get("epochs"),
        "steps per execution": model.steps_per_execution,
        "compiled by XLA": model.jit_compile,
        "eager": model.run_eagerly,
    }
    return {
        name: str(value)[:MOST_TEXT]
        for name, value in found.items()
        if value is not None
    }


def machine_in_words() -> dict[str, str]:
    """This machine: its name, system, processor, cores and memory."""
    facts = {"host": platform.node(), **describe_machine()}
    return {name: str(value)[:MOST_TEXT] for name, value in facts.items() if value}


def devices_here(strategy: Any) -> list[str]:
    """The devices of this process that a strategy trains on."""
    try:
        return [str(device) for device in strategy.extended.worker_devices]
    except (AttributeError, RuntimeError):
        # TensorFlow's default: the first GPU, if there is one.
        devices = tf.config.list_logical_devices()
        devices.sort(key=lambda device: device.device_type != "GPU")
        return [device.name for device in devices[:1]]


def device_bytes(strategy: Any) -> tuple[int, int] | None:
    """Memory in use now, and the most so far, of the fullest GPU; None: none is used.

    Cost: a question to TensorFlow's allocator for each GPU.
    """
    names = [tf.DeviceSpec.from_string(device) for device in devices_here(strategy)]
    found = [
        tf.config.experimental.get_memory_info(f"GPU:{name.device_index}")
        for name in names
        if name.device_type == "GPU"
    ]
    if not found:
        return None
    return max(i["current"] for i in found), max(i["peak"] for i in found)


def _is_ours(strategy: Any) -> bool:
    return type(strategy).__module__.startswith("tfdp.")


def _weights_in_words(model: keras.Model) -> str:
    if not model.built:
        return ""
    # Of sharded variables too the shapes are those of the whole.
    count = sum(int(np.prod(weight.shape)) for weight in model.weights)
    trainable = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    return f": {count:,} weights, {trainable:,} of them trained"


def _optimizer_in_words(optimizer: Any) -> str | None:
    if optimizer is None:
        return None
    parts = [type(optimizer).__name__]
    while (optimizer := getattr(optimizer, "inner_optimizer", None)) is not None:
        parts.append(type(optimizer).__name__)
    return " of ".join(parts)


def _name_of(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    name = getattr(value, "name", None) or getattr(value, "__name__", None)
    return str(name or type(value).__name__)


def _batch_size(model: keras.Model) -> int | None:
    """Rows of a global batch, where what `fit` reads states it."""
    for found in fits_around():
        if found.get("self") is model:
            adapter = getattr(found.get("epoch_iterator"), "data_adapter", None)
            return getattr(adapter, "batch_size", None)
    return None
