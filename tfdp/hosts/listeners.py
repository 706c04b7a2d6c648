"""Listening sockets, at as few addresses of this machine as will do."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any

from tfdp.cluster.description import join_address
from tfdp.errors import CollectiveError

__all__ = ["is_loopback", "listen", "listen_at", "local_address"]

BACKLOG = 128
# Binding says so of an address that is not of this machine.
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
# What a socket for both IPv4 and IPv6 makes of an IPv4 address.
IPV4_IN_IPV6 = "::ffff:"
LOOPBACK_NAMES = ("localhost", "localhost.localdomain")


def is_loopback(host: str) -> bool:
    """Whether `host` means the machine that uses it, whichever that is.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "node1")]
    [True, True, True, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in LOOPBACK_NAMES


def local_address(connection: socket.socket) -> Any:
    """The address of this machine that `connection` uses, with port 0, for `listen`."""
    host, _, *rest = connection.getsockname()
    if host.startswith(IPV4_IN_IPV6):
        return host.removeprefix(IPV4_IN_IPV6), 0
    return (host, 0, *rest)


def listen(address: Any) -> socket.socket:
    """A listening socket.

    Args:
      address: (host, port) and what else an IPv6 address has; host "" for all
        addresses of this machine, port 0 for any free one.

    Raises:
      CollectiveError: when the address is taken or not of this machine.
    """
    try:
        return _listen(address)
    except OSError as error:
        where = join_address(address[0] or "*", address[1])
        raise CollectiveError(
            f"Cannot listen on {where}: {error.strerror}. Another program may use the "
            "port: choose another coordinator port."
        ) from error


def listen_at(host: str, port: int) -> list[socket.socket]:
    """Listening sockets where others look for this machine under the name `host`.

    At those of its addresses that are of this machine. At all addresses when none is
    (a service or a gateway stands between), and when the name is this machine's own
    word for itself, by which others may know another address (Debian's 127.0.1.1).

    Raises:
      CollectiveError: when the port is taken.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    addresses: list[Any] = list(dict.fromkeys(target for *_, target in found))
    if not is_loopback(host) and any(is_loopback(address[0]) for address in addresses):
        addresses = []
    listeners: list[socket.socket] = []
    try:
        for address in addresses:
            try:
                listeners.append(_listen(address))
            except OSError as error:
                if error.errno not in NOT_HERE:
                    listen(address)  # once more, for the words of the error
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners or [listen(("", port))]


def _listen(address: Any) -> socket.socket:
    host, port, *_ = address
    if not host and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port),
                family=socket.AF_INET6,
                backlog=BACKLOG,
                dualstack_ipv6=True,
            )
        except OSError as error:
            if error.errno not in NOT_HERE:
                raise
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server(address, family=family, backlog=BACKLOG)
