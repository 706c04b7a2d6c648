"""Slurm and torchrun, the real ones: two workers that they start equal one device."""

import importlib.util
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
from tfdp.cluster.job_key import make_job_key

SCENARIO = "sgd"
SLURM_SECONDS = 30


def slurm_answers():
    """Whether this machine belongs to a Slurm cluster that works."""
    if shutil.which("srun") is None:
        return False
    try:
        done = subprocess.run(
            ["sinfo", "--noheader", "--states=idle,mixed"],
            capture_output=True,
            timeout=SLURM_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and bool(done.stdout.strip())


def has_torchrun():
    return importlib.util.find_spec("torch") is not None


needs_slurm = pytest.mark.skipif(
    not slurm_answers(), reason="no Slurm cluster with a free node answers"
)
needs_torchrun = pytest.mark.skipif(
    not has_torchrun(), reason="torch is not installed, whose launcher this is"
)


def own_variables(folder):
    """This process' environment without what launchers have set in it."""
    theirs = ("TFDP_", "SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "TF_CONFIG")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(theirs)}
    return kept | {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TFDP_JOB_KEY": make_job_key(),
        "PYTHONPATH": str(REPOSITORY),
        "TMPDIR": str(folder),
    }


def run(folder, *command):
    done = subprocess.run(
        [str(word) for word in command],
        cwd=REPOSITORY,
        env=own_variables(folder),
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def assert_both_equal_one_device(folder):
    expected = host_training.run(SCENARIO, tf.distribute.get_strategy())
    for rank in range(2):
        path = pathlib.Path(f"{folder}/run.{SCENARIO}.{rank}.npz")
        with np.load(path) as got:
            for key, value in expected.items():
                # As in test_multi_host.py.
                np.testing.assert_allclose(got[key], value, rtol=0, atol=2e-5)


@pytest.mark.slow
@needs_slurm
@pytest.mark.parametrize(
    "starter",
    [
        ("srun", "--ntasks=2", "--overcommit", "--kill-on-bad-exit=1", sys.executable),
        (
            *("srun", "--ntasks=1", "--overcommit", sys.executable, "-m", "tfdp"),
            *("launch", "--workers", "2"),
        ),
    ],
    ids=["two tasks", "tfdp launch within one task"],
)
def test_workers_of_slurm_equal_one_device(starter, tmp_path):
    job = ("-m", "tests.support.host_training", tmp_path / "run", "none", SCENARIO)
    run(tmp_path, *starter, *job)
    assert_both_equal_one_device(tmp_path)


@pytest.mark.slow
@needs_torchrun
def test_workers_of_torchrun_equal_one_device(tmp_path):
    run(
        tmp_path,
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("-m", "tests.support.host_training", tmp_path / "run", "none", SCENARIO),
    )
    assert_both_equal_one_device(tmp_path)
