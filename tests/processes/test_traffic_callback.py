"""`callbacks.Traffic` on two hosts, beside the kernel's own count of the same sockets.

The link counts what it hands to TCP, headers of exchanges included, and so does the
kernel (`TCP_INFO`): equal to the byte. What TCP and the network add is for
tests/network.
"""

import json

import pytest

from tests.support.mpi import needs_mpi, run_by_mpi
from tests.support.traffic_workers import BATCHES
from tests.support.workers import Workers

PROGRAM = "tests.support.traffic_workers"
WIDTH = 128
# Besides gradients: a header of 24 bytes for each exchange, some of single numbers.
MOST_OTHER_BYTES = 400 * BATCHES


def counts_in(output):
    return [
        json.loads(line.partition(" ")[2])
        for line in output.splitlines()
        if line.startswith("counts ")
    ]


def on_two_hosts(engine, devices):
    variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
    with Workers(2, PROGRAM, WIDTH, engine, variables=variables) as workers:
        return [counts for output in workers.succeed() for counts in counts_in(output)]


@pytest.mark.worth_seconds(15)
@pytest.mark.parametrize("devices", [1, 2])
def test_the_kernel_counts_the_same_bytes(devices):
    """A worker sends 2 n (H - 1) / H = n bytes, and each of its replicas n to the
    first, which sends n back: 2 (D - 1) n within."""
    workers = on_two_hosts("sockets", devices)
    assert len(workers) == 2
    for counts in workers:
        assert counts["between"] == counts["sockets"]
        for sent in counts["between"]:
            assert 0 < sent - counts["gradients"] <= MOST_OTHER_BYTES
        within = 2 * (devices - 1) * counts["gradients"]
        assert counts["within"] == [within] * 3


@pytest.mark.worth_seconds(15)
def test_rings_of_tensorflow_count_by_formula():
    # What is below 64 KiB goes over the link, and the kernel counts it.
    for counts in on_two_hosts("tensorflow", 1):
        rest = [counts["gradients"] + sent for sent in counts["sockets"]]
        assert counts["between"] == rest


@pytest.mark.worth_seconds(15)
@needs_mpi
def test_sums_of_mpi_count_by_formula():
    workers = counts_in(run_by_mpi(2, PROGRAM, WIDTH, "mpi"))
    assert len(workers) == 2
    for counts in workers:
        for sent in counts["between"]:
            assert 0 < sent - counts["gradients"] <= MOST_OTHER_BYTES
