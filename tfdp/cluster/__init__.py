"""The cluster of a job: its workers, this worker's rank, and the coordinator's address.

The only reader of the environment: `find_cluster` understands the variables of `tfdp
launch`, Kubernetes, Slurm, MPI and torchrun; `find_tpu` detects a TPU. No TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdp.cluster.description import Cluster
    from tfdp.cluster.find import find_cluster
    from tfdp.cluster.progress import START_AGAIN, restarts
    from tfdp.cluster.tpu import find_tpu

# Imported when first used: public name -> defining module.
_PUBLIC = {
    "START_AGAIN": "tfdp.cluster.progress",
    "Cluster": "tfdp.cluster.description",
    "find_cluster": "tfdp.cluster.find",
    "find_tpu": "tfdp.cluster.tpu",
    "restarts": "tfdp.cluster.progress",
}

__all__ = ["START_AGAIN", "Cluster", "find_cluster", "find_tpu", "restarts"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tfdp.cluster' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__]
