"""Local SGD schedules: how often replicas synchronize (`LocalSGD`, `DiLoCo`)."""

from tfdp.sync.diloco import DiLoCo
from tfdp.sync.local_sgd import LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]


def __dir__() -> list[str]:
    return [*__all__]
