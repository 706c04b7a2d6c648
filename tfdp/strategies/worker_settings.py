"""What every worker must be set up with alike, to compute the same numbers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfdp.errors import ConfigurationError
from tfdp.hosts.host_link import HostLink
from tfdp.plan.communication import Communication
from tfdp.plan.compression import Compression


def settings_of(
    strategy: Any,
    devices: Sequence[str],
    communication: Communication,
    draws_per_replica: bool,
) -> dict[str, Any]:
    """A strategy's options and Keras' types, by the names that users give them."""
    return {
        "devices_per_host": len(devices),
        "shard": strategy.shard,
        "shard_group": strategy.shard_group,
        "shard_min_bytes": strategy.shard_min_bytes,
        "offload": strategy.offload,
        "draws_per_replica": draws_per_replica,
        "keras.config.dtype_policy()": keras.config.dtype_policy().name,
        "keras.config.floatx()": keras.config.floatx(),
        **{
            f"Communication.{field.name}": _plain(getattr(communication, field.name))
            for field in dataclasses.fields(communication)
        },
    }


def _plain(value: Any) -> Any:
    """What JSON can hold: a compression by its name and arguments."""
    return repr(value) if isinstance(value, Compression) else value


def policies_of(model: Any) -> str:
    """The dtype policies of a model and its layers, as text."""
    layers = [model, *getattr(model, "layers", ())]
    return ", ".join(sorted({layer.dtype_policy.name for layer in layers}))


# Settings that every worker must have alike; another one is named with its worker.


# Of one worker's settings, which are names and numbers.
MOST_BYTES = 1 << 20


def refuse_differences(link: HostLink, settings: Mapping[str, Any]) -> None:
    """Compares this worker's settings with everybody's.

    Args:
      settings: by name; values that JSON can hold.

    Raises:
      ConfigurationError: on all workers, with each setting that is not the same
        everywhere and which worker has what.
    """
    mine = json.dumps(dict(settings))
    blobs = link.gather(mine.encode(), "settings", most_bytes=MOST_BYTES)
    everybody = [_parsed(blob, rank, link.rank) for rank, blob in enumerate(blobs)]
    found = differences(everybody)
    if found:
        raise ConfigurationError(
            f"The workers were set up differently: {'; '.join(found)}. Give every "
            "worker the same."
        )


def differences(everybody: Sequence[Mapping[str, Any]]) -> list[str]:
    """What differs, one sentence for each setting.

    Args:
      everybody: the settings of each worker, by rank.

    >>> differences([{"shard": "none", "offload": "none"},
    ...              {"shard": "optimizer", "offload": "none"}])
    ["shard is 'none' on worker 0, 'optimizer' on worker 1"]
    """
    names = dict.fromkeys(name for settings in everybody for name in settings)
    found = []
    for name in names:
        values = [settings.get(name) for settings in everybody]
        if any(value != values[0] for value in values):
            by_worker = (
                f"{value!r} on worker {rank}" for rank, value in enumerate(values)
            )
            found.append(f"{name} is {', '.join(by_worker)}")
    return found


def _parsed(blob: bytes, rank: int, own_rank: int) -> Mapping[str, Any]:
    try:
        settings = json.loads(blob)
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        # The engine "tensorflow" begins by telling a port.
        raise ConfigurationError(
            f"Worker {rank} has another Communication than worker {own_rank}: another "
            "engine. Give every worker the same."
        )
    return settings
