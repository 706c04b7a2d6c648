"""Workers on this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from tfdp.cluster.job_key import JOB_KEY
from tfdp.cluster.nvidia import ALLOW_GROWTH
from tfdp.cluster.ports import LOOPBACK
from tfdp.launch.environment import cluster_variables, local_environment
from tfdp.launch.gpus import own_gpus, share_of_gpus
from tfdp.launch.program import Program
from tfdp.launch.worker import WorkerCommand

__all__ = ["local_commands"]


def local_commands(
    program: Program,
    environment: Mapping[str, str],
    *,
    workers: int,
    port: int,
    devices_per_worker: int | None,
    cores: int,
    job_key: str,
    places: Sequence[int] | None = None,
    restarts: int = 0,
    workers_per_gpu: int = 1,
) -> list[WorkerCommand]:
    """One command per worker; they meet on the loopback interface.

    Args:
      workers: among which the machine's GPUs are shared, at least 1.
      places: those of them that run, rank 0 first; None: all. A place keeps its GPUs,
        and what another one leaves is left: it may be broken.
      restarts: how often they have been started before.
      workers_per_gpu: that share one; they take its memory as they need it.

    Raises:
      ConfigurationError: when the machine's GPUs do not go round evenly.
    """
    coordinator = f"{LOOPBACK}:{port}"
    gpus = own_gpus(environment)
    if workers_per_gpu > 1:
        environment = dict([ALLOW_GROWTH]) | dict(environment)
    running = range(workers) if places is None else places
    return [
        WorkerCommand(
            rank,
            program.command(sys.executable),
            local_environment(
                environment,
                cluster_variables(
                    len(running), rank, coordinator, devices_per_worker, restarts
                )
                | share_of_gpus(gpus, workers, place, workers_per_gpu)
                | {JOB_KEY: job_key},
                workers=len(running),
                rank=rank,
                cores=cores,
            ),
        )
        for rank, place in enumerate(running)
    ]
