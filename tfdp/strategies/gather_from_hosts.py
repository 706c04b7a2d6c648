"""Values and replica names gathered from all hosts."""

from __future__ import annotations

import json
from typing import Any

import tensorflow as tf

from tfdp.errors import CollectiveError, ConfigurationError
from tfdp.exchange.reducer import reducer_of
from tfdp.files.checked_json import parse_json
from tfdp.step.as_one_device import runs_as_one_device


def gather_from_hosts(strategy: Any, mine: Any, label: str) -> list[Any]:
    """Every host's JSON value, by rank; a collective that `label` names in errors."""
    blobs = strategy.gather_bytes(json.dumps(mine).encode(), label)
    try:
        return [parse_json(blob) for blob in blobs]
    except ValueError as error:
        raise CollectiveError(
            f"A worker's {label} cannot be read ({error}). Give every "
            "worker the same version of tfdp and the same callbacks."
        ) from error


def first_rank_of(strategy: Any) -> int:
    """The rank of this process's first replica."""
    return int(strategy.cluster.rank * len(strategy.extended.worker_devices))


def places_of(strategy: Any) -> list[str]:
    """Names of the replicas of this process with their devices, for messages."""
    cluster = strategy.cluster
    where = f" of worker {cluster.rank}" if cluster.workers > 1 else ""
    devices = map(tf.DeviceSpec.from_string, strategy.extended.worker_devices)
    return [
        f"replica {rank} ({device.device_type}:{device.device_index}{where})"
        for rank, device in enumerate(devices, first_rank_of(strategy))
    ]


def refuse_without_graphs(model: Any, name: str) -> None:
    """Raises a `ConfigurationError` unless steps of `model` are graphs of tfdp's
    replicas on CPUs or GPUs, which the callback `name` looks into."""
    refuse_strategy(model.distribute_strategy, name)
    if runs_as_one_device(model):
        raise ConfigurationError(
            f"{name} looks into the graphs of steps, and a step with run_eagerly=True "
            "has none. Compile with run_eagerly=False (and "
            "tf.config.run_functions_eagerly(False)), or remove the callback."
        )


def refuse_strategy(strategy: Any, name: str) -> None:
    """Raises a `ConfigurationError` unless the strategy is of tfdp, on CPUs or GPUs."""
    if reducer_of(strategy) is None:
        raise ConfigurationError(
            f"{name} inspects replicas of tfdp on CPUs and GPUs, but the model "
            f"was compiled under {type(strategy).__name__}. Make it under "
            "tfdp.DataParallelStrategy (one device is enough) or "
            "tfdp.MultiHostDataParallelStrategy, or remove the callback."
        )
