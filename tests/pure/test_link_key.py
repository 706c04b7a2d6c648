"""`make_link` hands the job's secret on, and worker 0 warns where there is no key."""

import warnings

import pytest

from tfdp.cluster import Cluster
from tfdp.errors import JobKeyWarning
from tfdp.hosts import choose_link
from tfdp.hosts.connect import job_secret
from tfdp.plan.communication import Communication

KEY = "0123456789abcdef"
SOCKETS = Communication(engine="sockets")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.delenv("TFDP_JOB_KEY", raising=False)
    monkeypatch.setattr(choose_link, "SocketLink", lambda *arguments: arguments)


@pytest.mark.parametrize("host", ["node1", "10.0.0.1", "[fd00::1]"])
def test_no_key_on_several_machines_is_said_by_worker_0(host):
    with pytest.warns(JobKeyWarning, match="same secret in the variable TFDP_JOB_KEY"):
        choose_link.make_link(Cluster(2, 0, f"{host}:1"), SOCKETS)


@pytest.mark.parametrize(
    "cluster, variable",
    [
        (Cluster(2, 0, "node1:1", job_key=KEY), ""),
        (Cluster(2, 0, "node1:1"), KEY),
        (Cluster(2, 1, "node1:1"), ""),
        (Cluster(2, 0, "127.0.0.1:1"), ""),
        (Cluster(2, 0, "[::1]:1"), ""),
        (Cluster(2, 0, "localhost:1"), ""),
    ],
)
def test_nothing_is_said_elsewhere(monkeypatch, cluster, variable):
    monkeypatch.setenv("TFDP_JOB_KEY", variable)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        link = choose_link.make_link(cluster, SOCKETS)
    assert link[-2:] == (job_secret(cluster), False)


def test_checksums_are_of_sockets(monkeypatch):
    """Also where an MPI launcher started the workers, whose connections have none."""
    monkeypatch.setattr(choose_link, "mpi_is_available", lambda: True)
    cluster = Cluster(2, 0, "127.0.0.1:1")
    assert choose_link.make_link(cluster, Communication(checksum=True))[-1] is True
