"""Accepts connections and lets workers of the job in; rejects all others.

One thread serves all handshakes at once, each with one deadline. A candidate that fails
is closed and counted. When MOST_CANDIDATES are open the oldest is closed: a worker's
handshake takes two round trips, so it is not the oldest for long.
"""

from __future__ import annotations

import dataclasses
import errno
import ipaddress
import selectors
import socket
import time
from collections.abc import Callable, Iterable
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
MOST_CANDIDATES = 128
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
PAUSE_SECONDS = 0.05


@dataclasses.dataclass
class _Candidate(Generic[Hello]):
    connection: socket.socket
    host: str
    steps: Steps[Hello]
    deadline: float
    wanted: int = 0
    heard: bytes = b""


class Listener(Generic[Hello]):
    """Listening sockets that require the job's secret; see `greet`. Closes them."""

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
        # In the order of arrival, which is that of the deadlines.
        self._candidates: dict[socket.socket, _Candidate[Hello]] = {}
        self._accepted: list[tuple[socket.socket, str, Hello]] = []
        self.turned_away = 0  # how many connections were rejected
        self._last_words = ""
        self._has_warned = False

    def next_worker(self, deadline: float) -> tuple[socket.socket, str, Hello]:
        """The next authenticated worker (connection, host, hello), or TimeoutError."""
        while not self._accepted:
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError("no worker came")
            for candidate in list(self._candidates.values()):
                if candidate.deadline <= now:
                    self._turn_away(candidate, "it did not say in time who it is")
            until = min([deadline, *(g.deadline for g in self._candidates.values())])
            for key, _ in self._selector.select(max(until - now, 0.0)):
                ready = self._candidates.get(key.fileobj)  # type: ignore[call-overload]
                if ready is not None:
                    self._hear(ready)
                elif key.fileobj in self._listeners:
                    self._open(key.fileobj)  # type: ignore[arg-type]
        return self._accepted.pop(0)

    def rejections(self) -> str:
        if not self.turned_away:
            return ""
        others = "1 other" if self.turned_away == 1 else f"{self.turned_away} others"
        return f" This listener turned {others} away, the last {self._last_words}."

    def close(self) -> None:
        self._selector.close()
        waiting = [connection for connection, _, _ in self._accepted]
        for each in (*self._listeners, *self._candidates, *waiting):
            each.close()

    def __enter__(self) -> Listener[Hello]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self, listener: socket.socket) -> None:
        if len(self._candidates) >= MOST_CANDIDATES:
            self._make_room()
        try:
            connection, address = listener.accept()
        except OSError as error:
            if error.errno in TOO_MANY_FILES and not self._make_room():
                time.sleep(PAUSE_SECONDS)  # until this process closes other files
            return
        connection.setblocking(False)
        host = address[0].removeprefix(IPV4_IN_IPV6)
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        candidate = _Candidate(connection, host, self._greet(), deadline)
        self._candidates[connection] = candidate
        self._selector.register(connection, selectors.EVENT_READ)
        self._go_on(candidate, None)

    def _make_room(self) -> bool:
        for candidate in self._candidates.values():
            self._turn_away(candidate, "too many came at once")
            return True
        return False

    def _hear(self, candidate: _Candidate[Hello]) -> None:
        try:
            data = candidate.connection.recv(candidate.wanted - len(candidate.heard))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._turn_away(candidate, HAS_CLOSED)
            return
        candidate.heard += data
        if len(candidate.heard) == candidate.wanted:
            heard, candidate.heard = candidate.heard, b""
            self._go_on(candidate, heard)

    def _go_on(self, candidate: _Candidate[Hello], heard: bytes | None) -> None:
        steps = candidate.steps
        try:
            step = next(steps) if heard is None else steps.send(heard)
            while isinstance(step, bytes):
                # A few bytes on a fresh connection: the kernel takes them at once.
                if candidate.connection.send(step) < len(step):
                    raise StrangerError("it does not listen")
                step = steps.send(b"")
            candidate.wanted = step
        except StopIteration as end:
            self._forget(candidate)
            connection = candidate.connection
            connection.setblocking(True)
            self._accepted.append((tuned(connection), candidate.host, end.value))
        except StrangerError as error:
            self._turn_away(candidate, str(error))
        except OSError:
            self._turn_away(candidate, HAS_CLOSED)

    def _turn_away(self, candidate: _Candidate[Hello], reason: str) -> None:
        self._forget(candidate)
        candidate.connection.close()
        self.turned_away += 1
        self._last_words = f"from {candidate.host}: {reason}"
        if reason == NOT_OF_THE_JOB and not self._has_warned:
            self._has_warned = True
            logging.warning("tfdp: A connection %s. It is ignored.", self._last_words)

    def _forget(self, candidate: _Candidate[Hello]) -> None:
        self._selector.unregister(candidate.connection)
        del self._candidates[candidate.connection]


BACKLOG = 128
# Errors of binding to an address of another machine.
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
# How a socket for IPv4 and IPv6 shows an IPv4 address.
IPV4_IN_IPV6 = "::ffff:"
LOOPBACK_NAMES = ("localhost", "localhost.localdomain")


def is_loopback(host: str) -> bool:
    """Whether `host` is the loopback address of any machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in LOOPBACK_NAMES


def local_address(connection: socket.socket) -> Any:
    """The local address of `connection` with port 0, for `listen`."""
    host, _, *rest = connection.getsockname()
    if host.startswith(IPV4_IN_IPV6):
        return host.removeprefix(IPV4_IN_IPV6), 0
    return (host, 0, *rest)


def listen(address: Any) -> socket.socket:
    """Listens at (host, port, ...), where "" is all addresses and 0 any free port."""
    try:
        return _listen(address)
    except OSError as error:
        where = join_address(address[0] or "*", address[1])
        cure = "Another program may use the port: choose another coordinator port."
        if error.errno in (errno.EMFILE, errno.ENFILE):
            cure = "Raise the limit of open files and sockets (ulimit -n 4096)."
        raise CollectiveError(
            f"Cannot listen on {where}: {error.strerror}. {cure}"
        ) from error


def listen_at(host: str, port: int) -> list[socket.socket]:
    """Listening sockets at those addresses of `host` that belong to this machine.

    Uses all addresses if none does (a service or gateway is in between), or if `host`
    resolves to loopback, where others may resolve another address (Debian's 127.0.1.1).
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
                    listen(address)  # raises with a better message
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
                ("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
            )
        except OSError as error:
            if error.errno not in NOT_HERE:
                raise
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server(address, family=family, backlog=BACKLOG)
