"""Which address of this machine other machines can reach."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

__all__ = ["own_address"]

# RFC 5737: of no machine. Its route is the default one.
ELSEWHERE = "192.0.2.1"
ANY_PORT = 9


def own_address(others: Sequence[str]) -> str | None:
    """The IPv4 address by which machines of these names reach this one; or None.

    It is where the route to one of them begins. The own name is asked last: Debian's
    /etc/hosts gives it the address 127.0.1.1, which no other machine can use.

    Args:
      others: host names of other machines.
    """
    own_name = socket.gethostname()
    for name in dict.fromkeys(others):
        if name != own_name:
            for target in _addresses_of(name):
                source = _start_of_route(target)
                if source is not None and _is_reachable(source):
                    return source
    candidates = [*_addresses_of(own_name), _start_of_route(ELSEWHERE)]
    return next((c for c in candidates if c is not None and _is_reachable(c)), None)


def _addresses_of(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in found]


def _start_of_route(target: str) -> str | None:
    """This machine's address on the way to `target`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, ANY_PORT))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _is_reachable(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_unspecified or parsed.is_link_local)
