"""A door: listens, and lets in who proves to be of the job; strangers do not matter.

All who knock are served side by side by the thread that waits, each with one deadline
for its whole handshake. Whoever fails is closed out and counted. There is room for so
many; when it is full, the one that has stood there longest goes, which a worker would
not be, since its handshake takes two round trips.
"""

from __future__ import annotations

import dataclasses
import errno
import ipaddress
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Generic, TypeVar

from absl import logging

from tfdp.cluster.description import join_address
from tfdp.errors import CollectiveError
from tfdp.hosts.connect import (
    HANDSHAKE_SECONDS,
    HAS_CLOSED,
    NOT_OF_THE_JOB,
    Steps,
    StrangerError,
    greet,
)
from tfdp.hosts.wire import tuned

Hello = TypeVar("Hello")
MOST_GUESTS = 128
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
PAUSE_SECONDS = 0.05


@dataclasses.dataclass
class _Candidate(Generic[Hello]):
    """Somebody who knocked: what is known, and what was heard so far."""

    connection: socket.socket
    host: str
    steps: Steps[Hello]
    deadline: float
    wanted: int = 0
    heard: bytes = b""


class Listener(Generic[Hello]):
    """Listening sockets with somebody who asks for the job's secret.

    Args:
      listeners: closed with the door.
      secret, purpose: see `greet`.
      parse: makes a hello of what a worker says, or raises ValueError.
    """

    def __init__(
        self,
        listeners: Iterable[socket.socket],
        secret: bytes,
        purpose: str,
        parse: Callable[[dict[str, Any]], Hello],
    ):
        self._greet = lambda: greet(secret, purpose, parse)
        self._listeners = list(listeners)
        self._selector = selectors.DefaultSelector()
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        # In the order in which they came, which is that of their deadlines.
        self._guests: dict[socket.socket, _Candidate[Hello]] = {}
        self._let_in: list[tuple[socket.socket, str, Hello]] = []
        #: How many were turned away.
        self.turned_away = 0
        self._last_words = ""
        self._has_warned = False

    def next_worker(self, deadline: float) -> tuple[socket.socket, str, Hello]:
        """The next who has proven to be of the job: connection, its host, its hello.

        Raises:
          TimeoutError: when nobody has by `deadline` (`time.monotonic`).
        """
        while not self._let_in:
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError("nobody came")
            for guest in list(self._guests.values()):
                if guest.deadline <= now:
                    self._turn_away(guest, "it did not say in time who it is")
            until = min([deadline, *(g.deadline for g in self._guests.values())])
            for key, _ in self._selector.select(max(until - now, 0.0)):
                guest_there = self._guests.get(key.fileobj)  # type: ignore[call-overload]
                if guest_there is not None:
                    self._hear(guest_there)
                elif key.fileobj in self._listeners:
                    self._open(key.fileobj)  # type: ignore[arg-type]
        return self._let_in.pop(0)

    def words(self) -> str:
        """What to add to the message that somebody is missing; "" without strangers."""
        if not self.turned_away:
            return ""
        others = "1 other was" if self.turned_away == 1 else f"{self.turned_away} were"
        return f" At this door {others} turned away, the last {self._last_words}."

    def close(self) -> None:
        """Closes the listeners, and whoever has not proven anything yet."""
        self._selector.close()
        waiting = [connection for connection, _, _ in self._let_in]
        for each in (*self._listeners, *self._guests, *waiting):
            each.close()

    def __enter__(self) -> Listener[Hello]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, listener: socket.socket) -> None:
        if len(self._guests) >= MOST_GUESTS:
            self._make_room()
        try:
            connection, address = listener.accept()
        except OSError as error:
            if error.errno in TOO_MANY_FILES and not self._make_room():
                time.sleep(PAUSE_SECONDS)  # for others of this process to close some
            return
        connection.setblocking(False)
        host = address[0].removeprefix(IPV4_IN_IPV6)
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        guest = _Candidate(connection, host, self._greet(), deadline)
        self._guests[connection] = guest
        self._selector.register(connection, selectors.EVENT_READ)
        self._go_on(guest, None)

    def _make_room(self) -> bool:
        for guest in self._guests.values():
            self._turn_away(guest, "too many came at once")
            return True
        return False

    def _hear(self, guest: _Candidate[Hello]) -> None:
        try:
            data = guest.connection.recv(guest.wanted - len(guest.heard))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._turn_away(guest, HAS_CLOSED)
            return
        guest.heard += data
        if len(guest.heard) == guest.wanted:
            heard, guest.heard = guest.heard, b""
            self._go_on(guest, heard)

    def _go_on(self, guest: _Candidate[Hello], heard: bytes | None) -> None:
        """Takes the steps of the handshake until it wants to hear more."""
        try:
            step = next(guest.steps) if heard is None else guest.steps.send(heard)
            while isinstance(step, bytes):
                # Some bytes on a fresh connection: the kernel takes them at once.
                if guest.connection.send(step) < len(step):
                    raise StrangerError("it does not listen")
                step = guest.steps.send(b"")
            guest.wanted = step
        except StopIteration as end:
            self._forget(guest)
            guest.connection.setblocking(True)
            self._let_in.append((tuned(guest.connection), guest.host, end.value))
        except StrangerError as error:
            self._turn_away(guest, str(error))
        except OSError:
            self._turn_away(guest, HAS_CLOSED)

    def _turn_away(self, guest: _Candidate[Hello], reason: str) -> None:
        self._forget(guest)
        guest.connection.close()
        self.turned_away += 1
        self._last_words = f"from {guest.host}: {reason}"
        if reason == NOT_OF_THE_JOB and not self._has_warned:
            self._has_warned = True
            logging.warning("tfdp: A connection %s. It is ignored.", self._last_words)

    def _forget(self, guest: _Candidate[Hello]) -> None:
        self._selector.unregister(guest.connection)
        del self._guests[guest.connection]


# Listening sockets, at as few addresses of this machine as will do.


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
