"""The MPI link: several processes under a real MPI launcher equal one device."""

import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.support import host_training
from tests.support.package_source import REPOSITORY
from tests.support.workers import LONGEST_SECONDS

pytest.importorskip("mpi4py")
BESIDE_PYTHON = pathlib.Path(sys.executable).with_name("mpiexec")
MPIEXEC = shutil.which("mpiexec") or (BESIDE_PYTHON.exists() and str(BESIDE_PYTHON))
pytestmark = pytest.mark.skipif(not MPIEXEC, reason="no mpiexec")

SCENARIOS = ("sgd", "accumulation", "masked-embedding")


@pytest.mark.worth_seconds(200)
def test_sums_by_mpi_equal_one_device(tmp_path):
    done = subprocess.run(
        [
            *(MPIEXEC, "-n", "2", "--bind-to", "none", sys.executable),
            *(
                "-m",
                "tests.support.host_training",
                str(tmp_path / "run"),
                "none",
                *SCENARIOS,
            ),
        ],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TFDP_DEVICES_PER_WORKER": "2",
            # Open MPI refuses both by default: root, as in containers, and more
            # processes than cores.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        },
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "engine mpi" in done.stdout
    for name in SCENARIOS:
        expected = host_training.run(name, tf.distribute.get_strategy())
        for rank in range(2):
            with np.load(f"{tmp_path}/run.{name}.{rank}.npz") as got:
                for key, value in expected.items():
                    # As in test_multi_host.py.
                    np.testing.assert_allclose(got[key], value, rtol=0, atol=2e-5)
