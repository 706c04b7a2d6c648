"""The handshake of every connection: both ends prove that they know the job's secret.

    who dials                                   who listens
    MAGIC, nonce d                         ->
                                           <-   MAGIC, nonce l
    HMAC(secret, "dials", ...)             ->
                                           <-   HMAC(secret, "listens", ...)
    hello, HMAC(secret, "says", ...)       ->
                                           <-   HMAC(secret, "welcomes", ...)

What is signed (...) holds the purpose of the connection and both nonces, at last the
hello as well. Both nonces are fresh, so nothing that was recorded can be used again;
the words "dials", "listens" differ, so nobody can be sent his own proof. A stranger who
knocks, or who waits to be dialed, is told a random number and a proof of it, no more:
who somebody is and where his other ports are is said after both have proven theirs.
Nothing is parsed, and no memory taken by a length, before that.

The steps are generators without a socket: they yield bytes to send (and are sent b""),
or the number of bytes that they want next (and are thrown a ConnectionResetError when
none come any more). `tfdp.hosts.door` and `tfdp.hosts.dial` run them.
"""

from __future__ import annotations

import hmac
import json
import secrets
import struct
from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

from tfdp.cluster import Cluster
from tfdp.cluster.job_key import find_job_key
from tfdp.hosts.messages import parse_object

__all__ = [
    "Steps",
    "StrangerError",
    "greet",
    "introduce",
    "job_secret",
    "session_secret",
]

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
