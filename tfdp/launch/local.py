"""Workers on this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from tfdp.cluster.job_key import JOB_KEY
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
) -> list[WorkerCommand]:
    """One command per worker; they meet on the loopback interface.

    Raises:
      ConfigurationError: when the machine's GPUs do not go round evenly.
    """
    coordinator = f"{LOOPBACK}:{port}"
    gpus = own_gpus(environment)
    return [
        WorkerCommand(
            rank,
            program.command(sys.executable),
            local_environment(
                environment,
                cluster_variables(workers, rank, coordinator, devices_per_worker)
                | share_of_gpus(gpus, workers, rank)
                | {JOB_KEY: job_key},
                workers=workers,
                rank=rank,
                cores=cores,
            ),
        )
        for rank in range(workers)
    ]
