"""When hosts wait for each other: `LocalSGD`, `DiLoCo`, `BackupWorkers`."""

from tfdp.sync.backup_workers import BackupWorkers
from tfdp.sync.diloco import DiLoCo
from tfdp.sync.local_sgd import LocalSGD

__all__ = ["BackupWorkers", "DiLoCo", "LocalSGD"]
