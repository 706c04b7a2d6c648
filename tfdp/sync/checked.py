"""What the argument `sync` of a `DistributedOptimizer` can be."""

from __future__ import annotations

from typing import Any

from tfdp.errors import ConfigurationError
from tfdp.sync.diloco import DiLoCo
from tfdp.sync.local_sgd import LocalSGD
from tfdp.sync.rounds import Sync

__all__ = ["checked_sync"]

METHODS: dict[str, type[Sync]] = {"DiLoCo": DiLoCo, "LocalSGD": LocalSGD}


def checked_sync(sync: Any) -> Sync | None:
    """`sync`, when it can be that argument; made anew from what `get_config` told.

    Raises:
      ConfigurationError: when it is something else.
    """
    if isinstance(sync, dict) and sync.get("method") in METHODS:
        values = dict(sync)
        return METHODS[values.pop("method")](**values)
    if sync is None or type(sync) in METHODS.values():
        return sync  # type: ignore[no-any-return]
    names = " or ".join(f"tfdp.sync.{name}(...)" for name in sorted(METHODS))
    raise ConfigurationError(
        f"sync must be {names}, or None to meet in every step. Received: {sync!r}."
    )
