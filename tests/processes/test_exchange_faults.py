"""Exchanges that a worker leaves at any of their steps end, with the reason."""

import subprocess
import sys

import pytest

from tests.support.exchange_faults import find_mpiexec
from tests.support.package_source import REPOSITORY

SEED = 20261122
# Only there to end a hang: each try has a deadline of its own.
HANG_SECONDS = {"fixed": 500, "20": 1500, "200": 6000}


def run(engine, tries):
    if engine == "mpi":
        pytest.importorskip("mpi4py")
        if not find_mpiexec():
            pytest.skip("no mpiexec")
    program = [sys.executable, "-m", "tests.support.exchange_faults"]
    done = subprocess.run(
        [*program, engine, tries, str(SEED)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=HANG_SECONDS[tries],
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert f"seed {SEED}: " in done.stdout


@pytest.mark.worth_seconds(30)
@pytest.mark.parametrize("engine", ["sockets", "mpi"])
def test_the_steps_that_have_hung(engine):
    run(engine, "fixed")


@pytest.mark.slow
@pytest.mark.timeout(6100)
@pytest.mark.parametrize("engine, tries", [("sockets", "200"), ("mpi", "20")])
def test_random_steps(engine, tries):
    run(engine, tries)
