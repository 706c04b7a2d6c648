"""`python -m tfdp.cluster`: prints the cluster that this process would find."""

from __future__ import annotations

import sys

from tfdp.cluster import find_cluster
from tfdp.errors import ClusterError

if __name__ == "__main__":
    try:
        print(find_cluster() or "the environment names no cluster")
    except ClusterError as error:
        sys.exit(f"tfdp: {error}")
