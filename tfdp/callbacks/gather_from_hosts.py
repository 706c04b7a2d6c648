"""What every host found, on every host; and how a person knows a replica."""

from __future__ import annotations

import json
from typing import Any

import tensorflow as tf

from tfdp.errors import CollectiveError, ConfigurationError
from tfdp.exchange.pipeline import GradientPipeline
from tfdp.files.checked_json import parse_json


def gather_from_hosts(strategy: Any, mine: Any, label: str) -> list[Any]:
    """What every host tells, by rank; all hosts must ask.

    Args:
      mine: this host's, which JSON can hold.
      label: names the exchange in errors.

    Raises:
      CollectiveError: when what came is no JSON.
    """
    blobs = strategy.gather_bytes(json.dumps(mine).encode(), label)
    try:
        return [parse_json(blob) for blob in blobs]
    except ValueError as error:
        raise CollectiveError(
            f"What a worker told of {label} cannot be read ({error}). Give every "
            "worker the same version of tfdp and the same callbacks."
        ) from error


def first_rank_of(strategy: Any) -> int:
    """The rank of this process's first replica among all."""
    cluster = getattr(strategy, "cluster", None)
    here = len(strategy.extended.worker_devices)
    return 0 if cluster is None else cluster.rank * here


def places_of(strategy: Any) -> list[str]:
    """Where each replica of this process is, in words, in their order."""
    cluster = getattr(strategy, "cluster", None)
    where = ""
    if cluster is not None and cluster.workers > 1:
        where = f" of worker {cluster.rank}"
    first = first_rank_of(strategy)
    names = [
        tf.DeviceSpec.from_string(device) for device in strategy.extended.worker_devices
    ]
    return [
        f"replica {first + rank} ({name.device_type}:{name.device_index}{where})"
        for rank, name in enumerate(names)
    ]


def refuse_strategy(strategy: Any, who: str) -> None:
    """Refuses a strategy whose replicas this callback cannot look into.

    Raises:
      ConfigurationError: when it is not tfdp's, or is of a TPU.
    """
    reducer = getattr(strategy.extended, "reducer", None)
    if not isinstance(reducer, GradientPipeline):
        raise ConfigurationError(
            f"{who} looks into the replicas of tfdp on CPUs and GPUs, and the model "
            f"was compiled under {type(strategy).__name__}. Make it under "
            "tfdp.DataParallelStrategy (of one device, too) or "
            "tfdp.MultiHostDataParallelStrategy, or leave the callback out."
        )
