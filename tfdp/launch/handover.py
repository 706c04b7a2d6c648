"""Hands the program over to a cluster's own launcher, `srun` or `mpiexec`.

They start, label, watch and stop processes themselves: this process builds their
command line and becomes it.
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
    """The `srun` command line; the allocation decides about `workers` None."""
    tasks = [] if workers is None else [f"--ntasks={workers}"]
    return [
        *("srun", *tasks, "--kill-on-bad-exit=1", "--label"),
        *_with_variables(program, devices_per_worker),
    ]


def mpi_command(
    program: Program, *, workers: int | None, devices_per_worker: int | None
) -> list[str]:
    """The `mpiexec` command line, with options common to all MPIs."""
    count = [] if workers is None else ["-n", str(workers)]
    return ["mpiexec", *count, *_with_variables(program, devices_per_worker)]


def _with_variables(program: Program, devices_per_worker: int | None) -> list[str]:
    # Through `env`, as every launcher has its own flag for passing variables.
    variables = {**UNBUFFERED, **device_variables(devices_per_worker)}
    settings = [f"{name}={value}" for name, value in variables.items()]
    return ["env", *settings, *program.command(sys.executable)]


def become(command: Sequence[str], needs: str) -> int:
    """Replaces this process by `command`; `needs` is advice if it is not on PATH."""
    path = shutil.which(command[0])
    if path is None:
        raise ConfigurationError(f"{command[0]} was not found on PATH. {needs}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(path, list(command))
