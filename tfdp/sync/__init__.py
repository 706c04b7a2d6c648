"""How hosts synchronize: in rounds (`LocalSGD`, `DiLoCo`), or late (`Delayed`)."""

from tfdp.sync.diloco import DiLoCo
from tfdp.sync.late import BoundedStaleness, Delayed
from tfdp.sync.local_sgd import LocalSGD

__all__ = ["BoundedStaleness", "Delayed", "DiLoCo", "LocalSGD"]
