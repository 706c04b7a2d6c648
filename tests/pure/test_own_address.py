"""The address under which worker 0 of an MPI job says that it can be met."""

import socket

import pytest

from tfdp.hosts import mpi_link as module
from tfdp.hosts.mpi_link import own_address

# As Debian's /etc/hosts has it: the own name is loopback, the others' are not.
NAMES = {"here": "127.0.1.1", "there": "10.0.0.7"}
ROUTES = {"10.0.0.7": "10.0.0.5", "127.0.1.1": "127.0.0.1"}


@pytest.fixture
def network(monkeypatch):
    def make(names=NAMES, routes=ROUTES):
        def getaddrinfo(name, *_):
            if name not in names:
                raise socket.gaierror("unknown")
            return [(0, 0, 0, "", (names[name], 0))]

        monkeypatch.setattr(module.socket, "gethostname", lambda: "here")
        monkeypatch.setattr(module.socket, "getaddrinfo", getaddrinfo)
        monkeypatch.setattr(module, "_start_of_route", routes.get)

    return make


@pytest.mark.parametrize(
    "others, names, routes, expected",
    [
        # Where the route to another machine begins.
        (["here", "there"], NAMES, ROUTES, "10.0.0.5"),
        # Its name is known to nobody here: the own one, when it is not loopback.
        (["there"], {"here": "10.0.0.6"}, {}, "10.0.0.6"),
        # Debian again, and no name service: the default route.
        (["there"], {"here": "127.0.1.1"}, {"192.0.2.1": "10.0.0.8"}, "10.0.0.8"),
        # Nothing but loopback, unspecified and link-local addresses.
        (["there"], {"here": "169.254.0.9"}, {"192.0.2.1": "0.0.0.0"}, None),
        (["there"], NAMES, {"10.0.0.7": "127.0.0.1"}, None),
    ],
)
def test_it_is_one_that_other_machines_reach(network, others, names, routes, expected):
    network(names, routes)
    assert own_address(others) == expected


def test_a_route_is_asked_for_without_sending():
    assert module._start_of_route("127.0.0.1") == "127.0.0.1"
