"""Which workers there are, which one this is, and where they meet.

The only reader of the environment: `find_cluster` understands what `tfdp launch`,
Kubernetes, Slurm, MPI and torchrun tell their processes. No TensorFlow here.
"""

from tfdp.cluster.description import Cluster
from tfdp.cluster.find import find_cluster

__all__ = ["Cluster", "find_cluster"]
