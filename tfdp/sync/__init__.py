"""When replicas meet that train on their own for a while: `LocalSGD` and `DiLoCo`."""

from tfdp.sync.diloco import DiLoCo
from tfdp.sync.local_sgd import LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
