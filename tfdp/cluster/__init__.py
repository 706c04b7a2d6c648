"""The cluster of a job: its workers, this worker's rank, and the coordinator's address.

The only reader of the environment: `find_cluster` understands the variables of `tfdp
launch`, Kubernetes, Slurm, MPI and torchrun; `find_tpu` detects a TPU. No TensorFlow.
"""

from tfdp.cluster.description import Cluster
from tfdp.cluster.find import find_cluster
from tfdp.cluster.progress import START_AGAIN, restarts
from tfdp.cluster.tpu import find_tpu

__all__ = ["START_AGAIN", "Cluster", "find_cluster", "find_tpu", "restarts"]


def __dir__() -> list[str]:
    return [*__all__]
