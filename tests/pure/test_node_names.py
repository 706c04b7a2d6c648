"""Names of hosts that nobody can look up: Slurm's address, or an error soon."""

import math
import socket
import sys

import pytest

from tests.support.launcher_environments import KUBERNETES, SLURM
from tests.support.launching import program
from tfdp.cluster import Cluster, addresses, find_cluster
from tfdp.cluster.addresses import slurm_address, unknown_name_seconds
from tfdp.errors import CollectiveError
from tfdp.hosts import rendezvous
from tfdp.hosts.connect import dial
from tfdp.hosts.rendezvous import connect_workers

NODE = (
    "NodeName=gnode10 Arch=x86_64 CPUTot=2 Gres=(null) NodeAddr={address} "
    "NodeHostName=gnode10 Version=22.05.8"
)
SCONTROL = """#!{python}
import sys
if sys.argv[1:] != ["--oneliner", "show", "node", "gnode10"]:
    sys.exit("Node not found")
print({said!r})
sys.exit({code})
"""
UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.fixture
def unknown_names(monkeypatch):
    """No name can be looked up; gives those that were tried."""
    tried = []

    def look_up(host, *_, **__):
        tried.append(host)
        raise UNKNOWN

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    slurm_address.cache_clear()
    yield tried
    slurm_address.cache_clear()


@pytest.fixture
def slurm(monkeypatch, tmp_path):
    """Makes this process task 3 of a step, with a `scontrol` that says `said`."""

    def make(said, code=0):
        text = SCONTROL.format(python=sys.executable, said=said, code=code)
        program(tmp_path / "bin", "scontrol", text)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        for name, value in SLURM.items():
            monkeypatch.setenv(name, value)

    return make


def test_slurm_is_asked_for_a_node_without_a_name(slurm, unknown_names):
    slurm(NODE.format(address="10.0.0.7"))
    assert find_cluster() == Cluster(4, 3, "10.0.0.7:20505", "Slurm")
    # Of a mapping nothing is looked up.
    assert find_cluster(SLURM).coordinator == "gnode10:20505"


def test_an_address_of_version_6_stands_in_brackets(slurm, unknown_names):
    slurm(NODE.format(address="fd00::7"))
    assert find_cluster().coordinator == "[fd00::7]:20505"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (NODE.format(address="gnode10"), 0),  # no other name than the unknown one
        (NODE.format(address="10.0.0.7"), 1),
        ("Node gnode10 not found", 0),
        (NODE.format(address="a/b:c"), 0),
        ("", 0),
    ],
)
def test_the_name_stays_where_slurm_knows_no_better(slurm, unknown_names, said, code):
    slurm(said, code)
    assert find_cluster().coordinator == "gnode10:20505"


def test_slurm_is_not_asked_for_a_name_that_is_known(slurm, monkeypatch):
    slurm(NODE.format(address="10.0.0.7"))
    monkeypatch.setattr(addresses, "_resolves", lambda _: True)
    slurm_address.cache_clear()
    assert find_cluster().coordinator == "gnode10:20505"
    slurm_address.cache_clear()


def test_an_address_of_the_user_stays(slurm, unknown_names, monkeypatch):
    slurm(NODE.format(address="10.0.0.7"))
    monkeypatch.setenv("TFDP_COORDINATOR", "head:1234")
    assert find_cluster().coordinator == "head:1234"
    assert unknown_names == []


def test_a_name_that_stays_unknown_ends_the_meeting_before_its_time(
    unknown_names, monkeypatch
):
    monkeypatch.setattr(rendezvous, "unknown_name_seconds", lambda: 0.2)
    # An hour: the limit of this test's time would end it.
    with pytest.raises(CollectiveError, match="'gnode10' cannot be looked up") as error:
        connect_workers(1, 2, "gnode10:20505", 1, 3600.0)
    assert "TFDP_COORDINATOR=ADDRESS:PORT" in str(error.value)
    assert len(unknown_names) > 1


def test_a_name_that_appears_is_taken(monkeypatch):
    """As in a pod that starts before the one of worker 0 has its place."""
    tries = []

    def look_up(host, port, **_):
        tries.append(host)
        if len(tries) < 3:
            raise UNKNOWN
        raise OSError("looked up at last")  # what a name without a listener ends in

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(OSError, match="looked up at last"):
        # The time is over at the third try, when the name is known.
        dial(("job-0.job", 1), b"", "meeting", dict, AtTry(tries, 3))
    assert len(tries) == 3


class AtTry:
    """A deadline that is over as soon as so many tries were made."""

    def __init__(self, tries, count):
        self._tries, self._count = tries, count

    def __le__(self, now):
        return len(self._tries) >= self._count


def test_names_may_come_late_in_pods_only():
    assert unknown_name_seconds(KUBERNETES) == math.inf
    assert unknown_name_seconds(SLURM) == addresses.UNKNOWN_NAME_SECONDS
