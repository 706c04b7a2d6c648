"""Under mpiexec: guests of each kind at each port of the engine "mpi"."""

import numpy as np
import pytest
from mpi4py import MPI

from tests.support.guests import (
    KINDS,
    KNOW_THE_KEY,
    MOST_TOLD_BYTES,
    SLOW,
    GuestedDoors,
)
from tfdp.hosts import socket_link
from tfdp.hosts.mpi_link import MpiLink

TIMEOUT_SECONDS = 120.0


def main():
    rank, workers = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    for kind in KINDS:
        for purpose in ("meeting", "ring"):
            if kind not in SLOW:
                visit(kind, purpose, rank, workers)
    if rank == 0:
        print(f"{2 * (len(KINDS) - len(SLOW))} visits")


def visit(kind, purpose, rank, workers):
    with pytest.MonkeyPatch.context() as patch:
        with GuestedDoors(patch, kind, purpose, None) as doors:
            connect = socket_link.connect_workers

            def noting_connect(*arguments):
                doors.note_secret(arguments[-1])
                return connect(*arguments)

            patch.setattr(socket_link, "connect_workers", noting_connect)
            link = MpiLink(rank, workers, None, TIMEOUT_SECONDS)
            (total,) = link.sum([np.array([1.0, 10.0]) * 2.0**rank], "numbers")
            link.gather(b"", "the end")
            link.close()
            assert total.tolist() == [3.0, 30.0], (kind, purpose, total)
            assert {host for host, _ in doors.listeners} == {"127.0.0.1"}
            assert len(doors.guests) == (purpose == "ring" or rank == 0)
            for guest in doors.guests:
                assert guest.was_closed_out(), (kind, purpose)
                assert b"addresses" not in guest.heard
                if kind not in KNOW_THE_KEY:
                    assert len(guest.heard) <= MOST_TOLD_BYTES, (kind, purpose)


if __name__ == "__main__":
    main()
