"""The kernel drops what comes to a listener from addresses that are not admitted."""

import socket
import sys

import pytest

from tests.support.guests import can_use_ipv6
from tests.support.open_files import open_files
from tfdp.hosts.server_guard import (
    admit_all,
    admit_only,
    listeners_on,
    source_address,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux")
SECONDS = 60.0
# Who is dropped is not told so: a try ends with its time.
DROPPED_SECONDS = 0.3


def reaches(server, source, seconds):
    host, port = server.getsockname()[:2]
    target = "127.0.0.1" if ":" not in source else "::1"
    try:
        with socket.create_connection((target, port), seconds, (source, 0)) as guest:
            server.accept()[0].close()
            return guest.recv(1) == b""
    except TimeoutError:
        return False


@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0", "both"])
@pytest.mark.parametrize(
    "others", [[], ["0:0:0:1::1", "::1"], ["10.0.0.1", "fd00::1", "fd00::2"]]
)
def test_only_the_admitted_reach_a_listener(bound, others):
    if bound == "both":
        if not (can_use_ipv6() and socket.has_dualstack_ipv6()):
            pytest.skip("this machine has no IPv6")
        options = {"family": socket.AF_INET6, "dualstack_ipv6": True}
        server = socket.create_server(("", 0), **options)
    else:
        server = socket.create_server((bound, 0))
    with server:
        assert reaches(server, "127.0.0.3", SECONDS)
        admit_only(server, ["127.0.0.2", *others])
        assert reaches(server, "127.0.0.2", SECONDS)
        assert not reaches(server, "127.0.0.3", DROPPED_SECONDS)
        if bound == "both":
            assert reaches(server, "::1", SECONDS if "::1" in others else 0.3) == (
                "::1" in others
            )
        admit_all(server)
        assert reaches(server, "127.0.0.3", SECONDS)


def test_hundreds_are_admitted():
    many = [f"10.1.{i}.{j}" for i in range(20) for j in range(50)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        admit_only(server, ["127.0.0.2", *many])
        assert reaches(server, "127.0.0.2", SECONDS)
        assert not reaches(server, "127.0.0.3", DROPPED_SECONDS)


def test_listeners_are_found_by_their_port():
    before = open_files()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as other:
        other.bind(("127.0.0.1", 0))  # and does not listen
        port = server.getsockname()[1]
        with listeners_on(port) as found:
            assert [each.getsockname() for each in found] == [server.getsockname()]
        with listeners_on(other.getsockname()[1]) as found:
            assert found == []
    assert not open_files() - before


def test_the_source_of_a_connection_is_known():
    assert source_address("127.0.0.1", 1) == "127.0.0.1"
    if can_use_ipv6():
        assert source_address("::1", 1) == "::1"
