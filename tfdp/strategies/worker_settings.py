"""Settings that must be identical on every worker."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfdp.errors import ConfigurationError
from tfdp.hosts.host_link import HostLink
from tfdp.plan.compression import Compression
from tfdp.plan.options import Given


def settings_of(given: Given, devices_per_host: int) -> dict[str, Any]:
    """A strategy's options and Keras' types, by their public names, for JSON."""
    values = {**given.values, "devices_per_host": devices_per_host}
    return {
        **{
            name: repr(value) if isinstance(value, Compression) else value
            for name, value in values.items()
            if name != "layout"
        },
        "layout": _rules_of(given["layout"]),
        "keras.config.dtype_policy()": keras.config.dtype_policy().name,
        "keras.config.floatx()": keras.config.floatx(),
    }


def _rules_of(layout: Any) -> str | None:
    """The mesh of `layout=` and its rules, as text; None: there are none."""
    if layout is None:
        return None
    from tfdp.grid.layouts import distribution_of, mesh_of, rules_of

    distribution = distribution_of(layout)
    rules = (f"{rule}: {axes}" for rule, axes in rules_of(distribution).items())
    return f"{mesh_of(distribution)}; {', '.join(rules)}"


def policies_of(model: Any) -> str:
    """The dtype policies of a model and its layers, as text."""
    layers = [model, *getattr(model, "layers", ())]
    return ", ".join(sorted({layer.dtype_policy.name for layer in layers}))


# Bound for one worker's settings.
MOST_BYTES = 1 << 20


def refuse_differences(link: HostLink, settings: Mapping[str, Any]) -> None:
    """Compares this worker's settings, as JSON, with those of all workers."""
    mine = json.dumps(dict(settings))
    blobs = link.gather(mine.encode(), "settings", most_bytes=MOST_BYTES)
    by_rank = [_parsed(blob, rank, link.rank) for rank, blob in enumerate(blobs)]
    found = differences(by_rank)
    if found:
        raise ConfigurationError(
            f"The workers were set up differently: {'; '.join(found)}. Give every "
            "worker the same."
        )


def differences(by_rank: Sequence[Mapping[str, Any]]) -> list[str]:
    """The differences between the workers' settings, one sentence for each setting.

    >>> differences([{"shard": "none", "offload": "none"},
    ...              {"shard": "optimizer", "offload": "none"}])
    ["shard is 'none' on worker 0, 'optimizer' on worker 1"]
    """
    names = dict.fromkeys(name for settings in by_rank for name in settings)
    found = []
    for name in names:
        values = [settings.get(name) for settings in by_rank]
        if any(value != values[0] for value in values):
            by_worker = [f"{value!r} on worker {i}" for i, value in enumerate(values)]
            found.append(f"{name} is {', '.join(by_worker)}")
    return found


def _parsed(blob: bytes, rank: int, own_rank: int) -> Mapping[str, Any]:
    try:
        settings = json.loads(blob)
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        # The engine "tensorflow" begins with a port number.
        raise ConfigurationError(
            f"Worker {rank} has another Communication than worker {own_rank}: another "
            "engine. Give every worker the same."
        )
    return settings
