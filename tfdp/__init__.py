"""tfdp: data-parallel training for Keras 3 on TensorFlow.

Names are resolved when first used, so that `import tfdp`, the command line's help
and the pure parts (topology, bucket plans) never load TensorFlow.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

from tfdp._private.lazy_names import lazy_names
from tfdp._version import __version__

if TYPE_CHECKING:
    from tfdp import (
        callbacks,
        checkpoint,
        cluster,
        compression,
        data,
        errors,
        layers,
        losses,
        optimizers,
        planning,
        ray,
        schedules,
        sync,
        testing,
    )
    from tfdp.cluster import Cluster, find_cluster
    from tfdp.grid.pipeline import pipeline
    from tfdp.layers.rematerialization import remat
    from tfdp.plan.communication import Communication
    from tfdp.plan.shards import Sharding
    from tfdp.step.distributed_optimizer import DistributedOptimizer
    from tfdp.strategies.auto import auto_strategy
    from tfdp.strategies.data_parallel import DataParallelStrategy
    from tfdp.strategies.devices import use_virtual_devices
    from tfdp.strategies.hierarchical import HierarchicalAllReduce
    from tfdp.strategies.keras_distribution import obey_keras_distribution
    from tfdp.strategies.multi_host import MultiHostDataParallelStrategy
    from tfdp.strategies.quiet import quiet
    from tfdp.strategies.tpu import TPUDataParallelStrategy

# Public name -> module that defines it. A module maps to itself.
_PUBLIC = {
    "Cluster": "tfdp.cluster",
    "Communication": "tfdp.plan.communication",
    "DataParallelStrategy": "tfdp.strategies.data_parallel",
    "DistributedOptimizer": "tfdp.step.distributed_optimizer",
    "HierarchicalAllReduce": "tfdp.strategies.hierarchical",
    "MultiHostDataParallelStrategy": "tfdp.strategies.multi_host",
    "Sharding": "tfdp.plan.shards",
    "TPUDataParallelStrategy": "tfdp.strategies.tpu",
    "auto_strategy": "tfdp.strategies.auto",
    "callbacks": "tfdp.callbacks",
    "checkpoint": "tfdp.checkpoint",
    "cluster": "tfdp.cluster",
    "compression": "tfdp.compression",
    "data": "tfdp.data",
    "errors": "tfdp.errors",
    "find_cluster": "tfdp.cluster",
    "layers": "tfdp.layers",
    "losses": "tfdp.losses",
    "obey_keras_distribution": "tfdp.strategies.keras_distribution",
    "optimizers": "tfdp.optimizers",
    "pipeline": "tfdp.grid.pipeline",
    "planning": "tfdp.planning",
    "quiet": "tfdp.strategies.quiet",
    "ray": "tfdp.ray",
    "remat": "tfdp.layers.rematerialization",
    "schedules": "tfdp.schedules",
    "sync": "tfdp.sync",
    "testing": "tfdp.testing",
    "use_virtual_devices": "tfdp.strategies.devices",
}
# These load Keras, which may fail with another backend.
_STRATEGIES = {
    "DataParallelStrategy",
    "MultiHostDataParallelStrategy",
    "TPUDataParallelStrategy",
    "auto_strategy",
    "obey_keras_distribution",
}
# These load without TensorFlow.
_PURE = {"Cluster", "Communication", "Sharding", "cluster", "errors", "find_cluster"}
_PURE |= {"sync"}

MISSING_TENSORFLOW = (
    "tfdp needs TensorFlow: pip install 'tfdp[cpu]' (no GPU), 'tfdp[gpu]' (CUDA) "
    "or 'tfdp[tpu]'."
)

__all__ = ["__version__", *sorted(_PUBLIC)]


def _has_tensorflow() -> bool:
    return importlib.util.find_spec("tensorflow") is not None


if not _has_tensorflow():
    warnings.warn(MISSING_TENSORFLOW, stacklevel=2)


_resolve, __dir__ = lazy_names(__name__, _PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC and name not in _PURE and not _has_tensorflow():
        from tfdp.errors import MissingDependencyError

        raise MissingDependencyError(MISSING_TENSORFLOW) from None
    if name in _STRATEGIES:
        from tfdp.strategies.keras_backend import check_keras_backend

        check_keras_backend()
    return _resolve(name)
