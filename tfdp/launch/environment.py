"""Environment variables for workers."""

from __future__ import annotations

from collections.abc import Mapping

from tfdp.cluster.progress import RESTARTS
from tfdp.strategies.quiet import LEVEL, LEVEL_OF_LAUNCHER

# Python would buffer the last lines of output to a pipe.
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}


def cluster_variables(
    workers: int,
    rank: int,
    coordinator: str,
    devices_per_worker: int | None = None,
    restarts: int = 0,
) -> dict[str, str]:
    """The variables that `tfdp.cluster.find_cluster` reads, and the restart count."""
    variables = {
        "TFDP_WORKERS": str(workers),
        "TFDP_RANK": str(rank),
        "TFDP_COORDINATOR": coordinator,
        RESTARTS: str(restarts),
    }
    return variables | device_variables(devices_per_worker)


def device_variables(devices_per_worker: int | None) -> dict[str, str]:
    """TFDP_DEVICES_PER_WORKER, if given."""
    if devices_per_worker is None:
        return {}
    return {"TFDP_DEVICES_PER_WORKER": str(devices_per_worker)}


def thread_variables(threads: int) -> dict[str, str]:
    """Variables by which a process starts `threads` threads, not one per core."""
    return dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"), str(threads))


def local_environment(
    environment: Mapping[str, str],
    variables: Mapping[str, str],
    *,
    workers: int,
    rank: int,
    cores: int,
) -> dict[str, str]:
    """The environment of one of `workers` workers on this machine.

    The workers share the machine's `cores`: each would otherwise start a thread per
    core. The user's settings in `environment` stay; `variables` override them.
    """
    defaults = dict(UNBUFFERED)
    if workers > 1:
        defaults |= thread_variables(max(1, cores // workers))
    if rank > 0:
        # All workers print the same greeting of TensorFlow; warnings still appear.
        # `tfdp.quiet()` hides those, too, unless the user has set the level.
        defaults[LEVEL] = "1"
        if LEVEL not in environment:
            defaults[LEVEL_OF_LAUNCHER] = "1"
    return {**defaults, **environment, **variables}
