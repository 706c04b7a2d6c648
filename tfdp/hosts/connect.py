"""Connections to another worker, tried until it is there and has proven who it is."""

from __future__ import annotations

import hmac
import json
import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

from absl import logging

from tfdp.cluster import Cluster
from tfdp.cluster.description import join_address
from tfdp.cluster.job_key import find_job_key
from tfdp.hosts.messages import parse_object
from tfdp.hosts.wire import receive_exactly, tuned

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


# The handshake of every connection: both ends prove that they know the job's secret.
#
#     who dials                                   who listens
#     MAGIC, nonce d                         ->
#                                            <-   MAGIC, nonce l
#     HMAC(secret, "dials", ...)             ->
#                                            <-   HMAC(secret, "listens", ...)
#     hello, HMAC(secret, "says", ...)       ->
#                                            <-   HMAC(secret, "welcomes", ...)
#
# What is signed (...) holds the purpose of the connection and both nonces, at last the
# hello as well. Both nonces are fresh, so nothing that was recorded can be used again;
# the words "dials", "listens" differ, so nobody can be sent his own proof. A stranger
# who knocks, or who waits to be dialed, is told a random number and a proof of it, no
# more: who somebody is and where his other ports are is said after both have proven
# theirs. Nothing is parsed, and no memory taken by a length, before that.
#
# The steps are generators without a socket: they yield bytes to send (and are sent
# b""), or the number of bytes that they want next (and are thrown a
# ConnectionResetError when none come any more). `tfdp.hosts.listener` and
# `tfdp.hosts.connect` run them.


Result = TypeVar("Result")
Steps: TypeAlias = Generator["bytes | int", bytes, Result]

# With the number of this protocol.
MAGIC = b"tfdp 2\r\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
MOST_HELLO_BYTES = 1024
LENGTH = struct.Struct(">H")
HASH = "sha256"

NOT_A_WORKER = "it does not speak as a worker of this tfdp does"
NOT_OF_THE_JOB = "it has another job key (TFDP_JOB_KEY), or belongs to another job"
HAS_CLOSED = "it closed the connection"
NOT_WELCOME = "it closed the connection when it heard which worker this is"
NO_HELLO = "what it says of itself is not what a worker says"


class StrangerError(ConnectionError):
    """The other side has not proven that it belongs to the job."""


def job_secret(cluster: Cluster) -> bytes:
    """What the workers of a job prove to know, from its key and its name.

    Without a key anybody can compute it; it then tells jobs apart that have names.
    """
    key = cluster.job_key or find_job_key() or ""
    return hmac.digest(key.encode(), b"tfdp job " + cluster.job.encode(), HASH)


def session_secret(secret: bytes, session: bytes) -> bytes:
    """The secret of one meeting, of which `session` is told to its members only."""
    return hmac.digest(secret, b"tfdp session " + session, HASH)


def introduce(secret: bytes, purpose: str, hello: dict[str, Any]) -> Steps[None]:
    """The steps of who dials.

    Args:
      secret: of the job or the session.
      purpose: what the connection is for, the same at the other end.
      hello: who this is, at most 1,024 bytes of JSON.

    Raises:
      StrangerError: when the other end cannot prove that it knows the secret.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    yield MAGIC + nonce
    signed = _signed(purpose, nonce, (yield from _nonce_of_other()))
    yield _proof(secret, "dials", signed)
    _check(secret, "listens", signed, (yield from _hear(PROOF_BYTES, NOT_OF_THE_JOB)))
    words = json.dumps(hello).encode()
    signed += words
    yield LENGTH.pack(len(words)) + words + _proof(secret, "says", signed)
    _check(secret, "welcomes", signed, (yield from _hear(PROOF_BYTES, NOT_WELCOME)))


def greet(
    secret: bytes, purpose: str, parse: Callable[[dict[str, Any]], Result]
) -> Steps[Result]:
    """The steps of who listens; they return what `parse` makes of the hello.

    Args:
      secret, purpose: see `introduce`.
      parse: checks the hello; its ValueError turns the other away.

    Raises:
      StrangerError: when the other end cannot prove that it knows the secret, or its
        hello is not one.
    """
    other = yield from _nonce_of_other()
    nonce = secrets.token_bytes(NONCE_BYTES)
    yield MAGIC + nonce
    signed = _signed(purpose, other, nonce)
    _check(secret, "dials", signed, (yield PROOF_BYTES))
    yield _proof(secret, "listens", signed)
    (size,) = LENGTH.unpack((yield LENGTH.size))
    if not 0 < size <= MOST_HELLO_BYTES:
        raise StrangerError(NO_HELLO)
    words = yield size
    signed += words
    _check(secret, "says", signed, (yield PROOF_BYTES))
    try:
        hello = parse(parse_object(words))
    except ValueError as error:
        raise StrangerError(NO_HELLO) from error
    yield _proof(secret, "welcomes", signed)
    return hello


def _nonce_of_other() -> Steps[bytes]:
    # At once when the first bytes are those of another protocol.
    if (yield from _hear(len(MAGIC), HAS_CLOSED)) != MAGIC:
        raise StrangerError(NOT_A_WORKER)
    return (yield from _hear(NONCE_BYTES, HAS_CLOSED))


def _hear(size: int, if_closed: str) -> Steps[bytes]:
    try:
        return (yield size)
    except ConnectionResetError as error:  # thrown in by who runs the steps
        raise StrangerError(if_closed) from error


def _signed(purpose: str, dials: bytes, listens: bytes) -> bytes:
    # Only what comes last, the hello, has no length of its own.
    name = purpose.encode()
    return MAGIC + LENGTH.pack(len(name)) + name + dials + listens


def _proof(secret: bytes, end: str, signed: bytes) -> bytes:
    return hmac.digest(secret, end.encode() + b"\0" + signed, HASH)


def _check(secret: bytes, end: str, signed: bytes, proof: bytes) -> None:
    if not hmac.compare_digest(proof, _proof(secret, end, signed)):
        raise StrangerError(NOT_OF_THE_JOB)
