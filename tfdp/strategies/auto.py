"""`auto_strategy`: the strategy for what is there."""

from __future__ import annotations

from typing import Any

from tfdp.cluster import find_cluster
from tfdp.cluster.tpu import find_tpu
from tfdp.strategies.data_parallel import DataParallelStrategy
from tfdp.strategies.multi_host import MultiHostDataParallelStrategy
from tfdp.strategies.tpu import TPUDataParallelStrategy

__all__ = ["auto_strategy"]


def auto_strategy(
    **options: Any,
) -> DataParallelStrategy | TPUDataParallelStrategy:
    """The strategy for what this process finds.

    In one of several workers (`tfdp launch`, TF_CONFIG, Slurm, Kubernetes, MPI,
    torchrun) a `MultiHostDataParallelStrategy`; else, where the environment or a
    device file speaks of a TPU, a `TPUDataParallelStrategy`; else all GPUs, or all
    logical CPUs where there is none, as a `DataParallelStrategy`.

    Args:
      **options: passed to the strategy.

    Raises:
      ClusterError: when the environment names a cluster incompletely or contradicts
        itself.
      TPUError: when there are signs of a TPU that cannot be used; it says which, and
        what to do.

    ```python
    import tfdp

    strategy = tfdp.auto_strategy()
    print(strategy.num_replicas_in_sync, strategy.engine_name)
    ```
    """
    cluster = find_cluster()
    if cluster is not None and cluster.workers > 1:
        return MultiHostDataParallelStrategy(cluster, **options)
    tpu = find_tpu()
    if tpu is not None:
        return TPUDataParallelStrategy(tpu.address, **options)
    return DataParallelStrategy(**options)
