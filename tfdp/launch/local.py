"""Workers on this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from tfdp.launch.environment import cluster_variables, local_environment
from tfdp.launch.port import LOOPBACK
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
) -> list[WorkerCommand]:
    """One command per worker; they meet on the loopback interface."""
    coordinator = f"{LOOPBACK}:{port}"
    return [
        WorkerCommand(
            rank,
            program.command(sys.executable),
            local_environment(
                environment,
                cluster_variables(workers, rank, coordinator, devices_per_worker),
                workers=workers,
                rank=rank,
                cores=cores,
            ),
        )
        for rank in range(workers)
    ]
