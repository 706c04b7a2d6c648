"""Connections to another worker, tried until it is there and has proven who it is."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from absl import logging

from tfdp.cluster.description import join_address
from tfdp.hosts.handshake import HAS_CLOSED, Steps, StrangerError, introduce
from tfdp.hosts.wire import receive_exactly, tuned

__all__ = ["HANDSHAKE_SECONDS", "Hello", "dial"]

# For a whole handshake: two round trips, and a busy machine.
HANDSHAKE_SECONDS = 10.0
CONNECT_SECONDS = 5.0
RETRY_SECONDS = 0.05
# After somebody else has answered, who may be there for long.
STRANGER_SECONDS = 0.5

# What to say of oneself on a connection.
Hello = Callable[[socket.socket], dict[str, Any]]


def dial(
    address: tuple[str, int],
    secret: bytes,
    purpose: str,
    hello: Hello,
    deadline: float,
    given_up: threading.Event | None = None,
    warns: bool = True,
    name_seconds: float = math.inf,
) -> socket.socket:
    """A connection to the worker that listens at `address`.

    Tried again until `deadline` (`time.monotonic`), also after somebody else answered:
    a worker of an earlier job may be about to leave. A name with several addresses is
    tried at each.

    Args:
      secret, purpose: see `introduce`.
      hello: what to say of oneself, see `introduce`.
      given_up: set by another thread to end the tries.
      warns: whether people are told of somebody else who answers.
      name_seconds: how long the name may be unknown, from the first try on.

    Raises:
      StrangerError: when somebody answered, but did not prove to be of this job.
      OSError: the last reason, when nobody listened there in time; a `socket.gaierror`
        when nobody knows the name.
    """
    known_until = time.monotonic() + name_seconds
    stranger: StrangerError | None = None
    failure: OSError | None = None
    while True:
        try:
            connection = _dial_once(address, secret, purpose, hello, deadline)
            # An error holds the frames of all who called, and they would hold it: what
            # they have would stay open until Python looks for such circles.
            stranger = failure = None
            return connection
        except StrangerError as error:
            if stranger is None and warns:
                logging.warning(
                    "tfdp: At %s answers somebody else than the worker looked for: %s. "
                    "Trying again until the time is over.",
                    join_address(*address),
                    error,
                )
            stranger = failure = error
        except socket.gaierror as error:
            if time.monotonic() >= known_until:
                raise
            failure = stranger or error
        except OSError as error:
            # The name is known, and may be forgotten for as long again.
            known_until = time.monotonic() + name_seconds
            # It is worth more to know that somebody was there.
            failure = stranger or error
        if time.monotonic() >= deadline or (given_up and given_up.is_set()):
            raise failure
        time.sleep(STRANGER_SECONDS if stranger else RETRY_SECONDS)


def _dial_once(
    address: tuple[str, int],
    secret: bytes,
    purpose: str,
    hello: Hello,
    deadline: float,
) -> socket.socket:
    """A try at each of the addresses that the name has."""
    failures: list[OSError] = []
    for family, _, _, _, target in socket.getaddrinfo(
        *address, type=socket.SOCK_STREAM
    ):
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            # Not less than a second: the last try is one, too.
            remaining = max(deadline - time.monotonic(), 1.0)
            connection.settimeout(min(remaining, CONNECT_SECONDS))
            connection.connect(target)
            if connection.getsockname() == connection.getpeername():
                # On a free local port Linux can connect a socket to itself.
                raise ConnectionRefusedError(111, "Connection refused")
            steps = introduce(secret, purpose, hello(connection))
            seconds = min(remaining, HANDSHAKE_SECONDS)
            _run(steps, connection, time.monotonic() + seconds)
            return tuned(connection)
        except OSError as error:
            connection.close()
            failures.append(error)
        except BaseException:
            connection.close()
            raise
    strangers = [error for error in failures if isinstance(error, StrangerError)]
    try:
        raise [*failures, *strangers][-1]
    finally:  # as above
        failures.clear()
        strangers.clear()


def _run(steps: Steps[None], connection: socket.socket, deadline: float) -> None:
    step = next(steps)
    try:
        while True:
            if isinstance(step, bytes):
                connection.settimeout(max(deadline - time.monotonic(), 0.01))
                connection.sendall(step)
                step = steps.send(b"")
                continue
            try:
                received = receive_exactly(connection, step, deadline)
            except TimeoutError:
                raise StrangerError("it does not answer") from None
            except ConnectionError:
                step = steps.throw(ConnectionResetError(HAS_CLOSED))
            else:
                step = steps.send(received)
    except StopIteration:
        return
