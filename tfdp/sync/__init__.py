"""How hosts synchronize: in rounds, late, without the slowest, or at their own pace."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdp.sync.asynchronous import Asynchronous
    from tfdp.sync.backup_workers import BackupWorkers
    from tfdp.sync.diloco import DiLoCo
    from tfdp.sync.late import BoundedStaleness, Delayed
    from tfdp.sync.local_sgd import LocalSGD

# Imported when first used: public name -> defining module.
_PUBLIC = {
    "Asynchronous": "tfdp.sync.asynchronous",
    "BackupWorkers": "tfdp.sync.backup_workers",
    "BoundedStaleness": "tfdp.sync.late",
    "Delayed": "tfdp.sync.late",
    "DiLoCo": "tfdp.sync.diloco",
    "LocalSGD": "tfdp.sync.local_sgd",
}

__all__ = [
    "Asynchronous",
    "BackupWorkers",
    "BoundedStaleness",
    "Delayed",
    "DiLoCo",
    "LocalSGD",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tfdp.sync' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__]
