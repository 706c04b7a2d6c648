"""How hosts synchronize: in rounds, late, without the slowest, or at their own pace."""

from tfdp.sync.asynchronous import Asynchronous
from tfdp.sync.backup_workers import BackupWorkers
from tfdp.sync.diloco import DiLoCo
from tfdp.sync.late import BoundedStaleness, Delayed
from tfdp.sync.local_sgd import LocalSGD

__all__ = [
    "Asynchronous",
    "BackupWorkers",
    "BoundedStaleness",
    "Delayed",
    "DiLoCo",
    "LocalSGD",
]


def __dir__() -> list[str]:
    return [*__all__]
