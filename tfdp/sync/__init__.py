"""How hosts synchronize: in rounds (`LocalSGD`, `DiLoCo`), late (`Delayed`,
`BoundedStaleness`), or without the last ones (`BackupWorkers`)."""

from tfdp.sync.backup_workers import BackupWorkers
from tfdp.sync.diloco import DiLoCo
from tfdp.sync.late import BoundedStaleness, Delayed
from tfdp.sync.local_sgd import LocalSGD

__all__ = ["BackupWorkers", "BoundedStaleness", "Delayed", "DiLoCo", "LocalSGD"]
