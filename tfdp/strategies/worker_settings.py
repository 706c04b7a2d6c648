"""What every worker must be set up with alike, to compute the same numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from tfdp.plan.communication import Communication
from tfdp.plan.compression import Compression

__all__ = ["policies_of", "settings_of"]


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
