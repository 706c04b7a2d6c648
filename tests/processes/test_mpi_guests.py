"""Guests at the ports of the engine "mpi", as at those of the sockets."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.support.package_source import REPOSITORY
from tests.support.workers import LONGEST_SECONDS

pytest.importorskip("mpi4py")
BESIDE_PYTHON = pathlib.Path(sys.executable).with_name("mpiexec")
MPIEXEC = shutil.which("mpiexec") or (BESIDE_PYTHON.exists() and str(BESIDE_PYTHON))
pytestmark = pytest.mark.skipif(not MPIEXEC, reason="no mpiexec")


def test_guests_change_nothing_and_learn_nothing():
    command = (MPIEXEC, "-n", "2", "--bind-to", "none", sys.executable)
    environment = {
        name: value for name, value in os.environ.items() if name != "TFDP_JOB_KEY"
    }
    done = subprocess.run(
        [*command, "-m", "tests.support.mpi_guests"],
        cwd=REPOSITORY,
        # Open MPI refuses both by default: root, as in containers, and more
        # processes than cores.
        env={
            **environment,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        },
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "42 visits" in done.stdout
