"""The variables that a worker is started with."""

from __future__ import annotations

from collections.abc import Mapping

from tfdp.cluster.progress import RESTARTS

# A worker's output goes through a pipe, where Python would hold back its last lines.
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}


def cluster_variables(
    workers: int,
    rank: int,
    coordinator: str,
    devices_per_worker: int | None = None,
    restarts: int = 0,
) -> dict[str, str]:
    """What `tfdp.cluster.find_cluster` reads first, and how often this was restarted.

    >>> cluster_variables(2, 1, "node1:20000")["TFDP_RANK"]
    '1'
    """
    variables = {
        "TFDP_WORKERS": str(workers),
        "TFDP_RANK": str(rank),
        "TFDP_COORDINATOR": coordinator,
        RESTARTS: str(restarts),
    }
    return variables | device_variables(devices_per_worker)


def device_variables(devices_per_worker: int | None) -> dict[str, str]:
    """TFDP_DEVICES_PER_WORKER, when it was asked for."""
    if devices_per_worker is None:
        return {}
    return {"TFDP_DEVICES_PER_WORKER": str(devices_per_worker)}


def local_environment(
    environment: Mapping[str, str],
    variables: Mapping[str, str],
    *,
    workers: int,
    rank: int,
    cores: int,
) -> dict[str, str]:
    """The environment of one of `workers` workers that share this machine.

    Every worker would start as many threads as the machine has cores; they get their
    share of the cores instead. What the user has set stays.

    Args:
      environment: the launcher's own.
      variables: those of `cluster_variables`, which win.
      cores: that the workers may use together.
    """
    defaults = dict(UNBUFFERED)
    if workers > 1:
        threads = str(max(1, cores // workers))
        defaults |= {"OMP_NUM_THREADS": threads, "TF_NUM_INTRAOP_THREADS": threads}
    if rank > 0:
        # TensorFlow's greeting is the same in every worker; warnings still come.
        defaults["TF_CPP_MIN_LOG_LEVEL"] = "1"
    return {**defaults, **environment, **variables}
