"""Which workers there are, which one this is, and where they meet.

The only reader of the environment: `find_cluster` understands what `tfdp launch`,
Kubernetes, Slurm, MPI and torchrun tell their processes; `find_tpu` sees a TPU. No
TensorFlow here.
"""

from tfdp.cluster.description import Cluster
from tfdp.cluster.find import find_cluster
from tfdp.cluster.progress import START_AGAIN, restarts
from tfdp.cluster.tpu import find_tpu

__all__ = ["START_AGAIN", "Cluster", "find_cluster", "find_tpu", "restarts"]
