"""Starts the workers of a test by MPI."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.support.package_source import REPOSITORY
from tests.support.workers import LONGEST_SECONDS

BESIDE_PYTHON = pathlib.Path(sys.executable).with_name("mpiexec")
MPIEXEC = shutil.which("mpiexec") or (BESIDE_PYTHON.exists() and str(BESIDE_PYTHON))

needs_mpi = pytest.mark.skipif(
    not MPIEXEC or importlib.util.find_spec("mpi4py") is None, reason="no MPI"
)


def run_by_mpi(workers, module, *arguments, environment=os.environ, **variables):
    """What `python -m module arguments` printed, of all workers; they have succeeded.

    Args:
      workers: how many.
      module: a module of this repository.
      arguments: its arguments, alike for all.
      environment: that of the workers.
      variables: more variables for it.
    """
    done = subprocess.run(
        [
            *(MPIEXEC, "-n", str(workers), "--bind-to", "none"),
            *(sys.executable, "-m", module, *map(str, arguments)),
        ],
        cwd=REPOSITORY,
        env={
            **environment,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            # Open MPI refuses both by default: root, as in containers, and more
            # processes than cores.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
