"""Connects to another worker, with retries, and authenticates both ends."""

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

# For a whole handshake: two round trips on a busy machine.
HANDSHAKE_SECONDS = 10.0
CONNECT_SECONDS = 5.0
RETRY_SECONDS = 0.05
# After another process has answered: it may stay for long.
STRANGER_SECONDS = 0.5

# Returns what this worker sends about itself on a connection.
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
    """Connects to the worker that listens at `address`.

    Retries until `deadline` (`time.monotonic`), also after another process answers: a
    worker of an earlier job may still be leaving. Tries all addresses of a name.

    Args:
      secret, purpose, hello: see `introduce`.
      given_up: another thread sets it to end the retries.
      warns: whether to log that another process answers.
      name_seconds: how long the name may fail to resolve.

    Raises StrangerError if a process answered that is not of this job, else the last
    OSError; a `socket.gaierror` if the name does not resolve.
    """
    known_until = time.monotonic() + name_seconds
    stranger: StrangerError | None = None
    failure: OSError | None = None
    while True:
        try:
            connection = _dial_once(address, secret, purpose, hello, deadline)
            # An error holds its callers' frames, and they would hold it: what they
            # refer to would stay open until Python collects such cycles.
            stranger = failure = None
            return connection
        except StrangerError as error:
            if stranger is None and warns:
                logging.warning(
                    f"tfdp: The process at {join_address(*address)} is not the worker "
                    f"looked for: {error}. Trying again until the time is over."
                )
            stranger = failure = error
        except socket.gaierror as error:
            if time.monotonic() >= known_until:
                raise
            failure = stranger or error
        except OSError as error:
            # The name resolves now, and may fail again for as long.
            known_until = time.monotonic() + name_seconds
            # A stranger's answer is the more useful error.
            failure = stranger or error
        if time.monotonic() >= deadline or (given_up and given_up.is_set()):
            raise failure
        time.sleep(STRANGER_SECONDS if stranger else RETRY_SECONDS)


def _dial_once(
    address: tuple[str, int], secret: bytes, purpose: str, hello: Hello, deadline: float
) -> socket.socket:
    """Tries each address of the name once."""
    failures: list[OSError] = []
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    for family, _, _, _, target in found:
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            # At least a second, for the last retry as well.
            remaining = max(deadline - time.monotonic(), 1.0)
            connection.settimeout(min(remaining, CONNECT_SECONDS))
            connection.connect(target)
            if connection.getsockname() == connection.getpeername():
                # Linux can connect a socket on a free local port to itself.
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
    finally:  # break the reference cycle, see `dial`
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


# The handshake of every connection: both ends prove that they have the job's secret.
#
#     dialing end                                 listening end
#     MAGIC, nonce d                         ->
#                                            <-   MAGIC, nonce l
#     HMAC(secret, "dials", ...)             ->
#                                            <-   HMAC(secret, "listens", ...)
#     hello, HMAC(secret, "says", ...)       ->
#                                            <-   HMAC(secret, "welcomes", ...)
#
# The signed data (...) is the connection's purpose, both nonces, and finally the hello.
# Fresh nonces prevent replay; different words prevent reflection of a peer's own proof.
# A stranger gets a random number and a proof of it, no more: ranks and ports are sent
# after both ends are authenticated, and nothing is parsed or allocated before.
#
# The steps are generators without a socket: they yield bytes to send (and get b""), or
# the number of bytes to read next (and are thrown a ConnectionResetError at the end).

Result = TypeVar("Result")
Steps: TypeAlias = Generator["bytes | int", bytes, Result]

# Contains the protocol's version.
MAGIC = b"tfdp 2\r\n"
NONCE_BYTES = PROOF_BYTES = 32
SESSION_BYTES = 32  # see `session_secret`
MOST_HELLO_BYTES = 1024
LENGTH = struct.Struct(">H")
HASH = "sha256"

NOT_A_WORKER = "it does not speak the protocol of this tfdp"
NOT_OF_THE_JOB = "it has another job key (TFDP_JOB_KEY), or belongs to another job"
HAS_CLOSED = "it closed the connection"
NOT_WELCOME = "it closed the connection after this worker's hello"
NO_HELLO = "its hello is not one that a worker sends"


class StrangerError(ConnectionError):
    """The other end has not proven that it belongs to the job."""


def job_secret(cluster: Cluster) -> bytes:
    """A job's secret, from key and name; without a key it only separates jobs."""
    key = cluster.job_key or find_job_key() or ""
    return hmac.digest(key.encode(), b"tfdp job " + cluster.job.encode(), HASH)


def session_secret(secret: bytes, session: bytes) -> bytes:
    """The secret of one rendezvous; only its members receive `session`."""
    return hmac.digest(secret, b"tfdp session " + session, HASH)


def introduce(secret: bytes, purpose: str, hello: dict[str, Any]) -> Steps[None]:
    """The handshake of the dialing end; `purpose` is the same at both ends.

    `hello` describes this worker in at most 1,024 bytes of JSON. Raises StrangerError
    if the other end does not prove that it has the secret.
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
    """The handshake of the listening end; returns what `parse` makes of the hello.

    Raises StrangerError if the other end does not prove that it has the secret, or
    `parse` raises ValueError.
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
    # Fails at once on the first bytes of another protocol.
    if (yield from _hear(len(MAGIC), HAS_CLOSED)) != MAGIC:
        raise StrangerError(NOT_A_WORKER)
    return (yield from _hear(NONCE_BYTES, HAS_CLOSED))


def _hear(size: int, if_closed: str) -> Steps[bytes]:
    try:
        return (yield size)
    except ConnectionResetError as error:  # thrown into the generator
        raise StrangerError(if_closed) from error


def _signed(purpose: str, dials: bytes, listens: bytes) -> bytes:
    # Lengths are fixed or included, except that of the hello, which comes last.
    name = purpose.encode()
    return MAGIC + LENGTH.pack(len(name)) + name + dials + listens


def _proof(secret: bytes, end: str, signed: bytes) -> bytes:
    return hmac.digest(secret, end.encode() + b"\0" + signed, HASH)


def _check(secret: bytes, end: str, signed: bytes, proof: bytes) -> None:
    if not hmac.compare_digest(proof, _proof(secret, end, signed)):
        raise StrangerError(NOT_OF_THE_JOB)
