"""Clusters that have a launcher of their own: hand the program over to it.

`srun` and `mpiexec` start, label, watch and stop processes already; here only their
command lines are built, and this process becomes theirs.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from tfdp.errors import ConfigurationError
from tfdp.launch.environment import UNBUFFERED, device_variables
from tfdp.launch.program import Program


def slurm_command(
    program: Program, *, workers: int | None, devices_per_worker: int | None
) -> list[str]:
    """The `srun` command line: one task per worker, the first failure ends all.

    Args:
      workers: None leaves the number of tasks to the allocation.

    >>> " ".join(slurm_command(
    ...     Program("train.py"), workers=4, devices_per_worker=None
    ... )[:4])
    'srun --ntasks=4 --kill-on-bad-exit=1 --label'
    """
    tasks = [] if workers is None else [f"--ntasks={workers}"]
    return [
        *("srun", *tasks, "--kill-on-bad-exit=1", "--label"),
        *_with_variables(program, devices_per_worker),
    ]


def mpi_command(
    program: Program, *, workers: int | None, devices_per_worker: int | None
) -> list[str]:
    """The `mpiexec` command line, in the words that all MPIs share.

    Args:
      workers: None leaves the number to mpiexec and the allocation it finds.
    """
    count = [] if workers is None else ["-n", str(workers)]
    return ["mpiexec", *count, *_with_variables(program, devices_per_worker)]


def _with_variables(program: Program, devices_per_worker: int | None) -> list[str]:
    # `env` on the remote side: every launcher has its own flag for passing variables.
    variables = {**UNBUFFERED, **device_variables(devices_per_worker)}
    settings = [f"{name}={value}" for name, value in variables.items()]
    return ["env", *settings, *program.command(sys.executable)]


def become(command: Sequence[str], needs: str) -> int:
    """Replaces this process by the command.

    Args:
      needs: what to do when there is no such program, for the message.

    Raises:
      ConfigurationError: when the program is not on PATH.
    """
    path = shutil.which(command[0])
    if path is None:
        raise ConfigurationError(f"{command[0]} was not found on PATH. {needs}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(path, list(command))
