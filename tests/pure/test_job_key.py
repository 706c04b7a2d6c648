"""The key and the name of a job: where they come from; where addresses are split."""

import pytest

from tests.support.launcher_environments import SLURM, TFDP, TORCHRUN
from tfdp.cluster import Cluster, find_cluster
from tfdp.cluster.description import join_address, split_address
from tfdp.cluster.job_key import JOB_KEY, find_job_key, make_job_key
from tfdp.errors import ClusterError, CollectiveError
from tfdp.hosts.rendezvous import parse_address

KEY = "0123456789abcdef"


@pytest.mark.parametrize("environment", [TFDP, SLURM, TORCHRUN])
def test_every_source_takes_the_key(environment):
    assert find_cluster(environment).job_key is None
    assert find_cluster({**environment, JOB_KEY: f"{KEY}\n"}).job_key == KEY
    assert find_cluster({JOB_KEY: KEY}) is None


@pytest.mark.parametrize("key", ["short", "with a space in it", "ü" * 20, "x" * 257])
def test_what_is_no_key_is_refused_and_not_shown(key):
    for make in (
        lambda: find_cluster({**TFDP, JOB_KEY: key}),
        lambda: Cluster(2, 0, "h:1", job_key=key),
    ):
        with pytest.raises(ClusterError, match="16 to 256 printable") as caught:
            make()
        assert key not in str(caught.value)
    with pytest.raises(ClusterError, match="Cluster.job_key"):
        Cluster(2, 0, "h:1", job_key=KEY.encode())


def test_a_key_is_new_each_time_and_never_printed():
    assert make_job_key() != make_job_key()
    assert find_job_key({JOB_KEY: ""}) is None
    cluster = Cluster(2, 0, "h:1", job_key=KEY)
    assert KEY not in repr(cluster) and cluster == Cluster(2, 0, "h:1")


def test_launchers_name_their_jobs():
    steps = [find_cluster({**SLURM, "SLURM_STEP_ID": step}).job for step in "01"]
    assert len({*steps, find_cluster({**SLURM, "SLURM_JOB_ID": "7"}).job}) == 3
    assert find_cluster({**TORCHRUN, "TORCHELASTIC_RUN_ID": "a"}).job == "a"
    assert find_cluster(TFDP).job == ""


@pytest.mark.parametrize(
    "address, expected",
    [
        ("node1:20000", ("node1", 20000)),
        ("127.0.0.1:1", ("127.0.0.1", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_addresses_are_split_and_joined(address, expected):
    assert split_address(address) == parse_address(address) == expected
    assert join_address(*expected) == address
    assert Cluster(2, 0, address).coordinator == address


@pytest.mark.parametrize(
    "address",
    [
        "::1:80",
        "[::1]",
        "[node1]:80",
        "[::1]:0",
        "node1:٣",
        "node1:²",
        "a b:80",
        "[]:1",
    ],
)
def test_what_is_no_address_is_refused(address):
    assert split_address(address) is None
    with pytest.raises(CollectiveError, match="IPv6 host in brackets"):
        parse_address(address)
    with pytest.raises(ClusterError, match="host:port"):
        Cluster(2, 0, address)
