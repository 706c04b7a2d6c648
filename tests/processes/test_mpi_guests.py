"""Guests at the ports of the engine "mpi", as at those of the sockets."""

import os

from tests.support.guests import KINDS, SLOW
from tests.support.mpi import needs_mpi, run_by_mpi

pytestmark = needs_mpi


def test_guests_change_nothing_and_learn_nothing():
    environment = {
        name: value for name, value in os.environ.items() if name != "TFDP_JOB_KEY"
    }
    printed = run_by_mpi(2, "tests.support.mpi_guests", environment=environment)
    assert f"{2 * (len(KINDS) - len(SLOW))} visits" in printed
