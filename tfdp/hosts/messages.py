"""Checks of received messages: bad input raises, and is never used unchecked."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tfdp.checks import is_number, is_whole
from tfdp.cluster.worker_names import name_workers
from tfdp.errors import CollectiveError

MOST_REASON_CHARACTERS = 4096
MOST_CHARACTERS = 255  # of a host name or version
MOST_WORKERS = 1 << 20
MOST_PORT = 65535
Read = TypeVar("Read")


def parse_object(line: bytes | bytearray) -> dict[str, Any]:
    """Parses a JSON object; raises ValueError if it is none or nests too deeply."""
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message


def read_as(
    read: Callable[[bytes | memoryview], Read],
    data: bytes | memoryview,
    rank: int,
    what: str,
) -> Read:
    """Parses a worker's bytes with `read`; raises a CollectiveError about `what`."""
    try:
        return read(data)
    # Raised by text, JSON and NumPy; by structs; by deep nesting; by missing parts.
    except (ValueError, struct.error, RecursionError, TypeError, LookupError) as error:
        raise CollectiveError(
            f"Worker {rank} sent no {what}, but {len(data)} bytes that cannot be read "
            f"as one ({error}): it runs another program or another tfdp, or the "
            "network damages data. Communication(checksum=True) tells which."
        ) from error


def checked_integer(value: object, least: int, most: int) -> int:
    """Returns `value` if it is an integer (no bool) in range, or ValueError."""
    if not is_whole(value, least, most):
        raise ValueError(f"not an integer from {least} to {most}")
    return value


def checked_text(value: object, most_characters: int) -> str:
    """Returns `value` if it is a text of at most so many characters, or ValueError."""
    if not isinstance(value, str) or len(value) > most_characters:
        raise ValueError(f"not a text of at most {most_characters} characters")
    return value


def checked_address(value: object) -> tuple[str, int]:
    """Returns `value` if it is a list of host and port, or ValueError."""
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("not an address")
    host, port = value
    return checked_text(host, MOST_CHARACTERS), checked_integer(port, 1, MOST_PORT)


def checked_seconds(value: object, most: float) -> float:
    """Returns `value` as a float if it is a number from 0 to `most`, or ValueError."""
    if not is_number(value) or not 0 <= value <= most:
        raise ValueError(f"not a number from 0 to {most:g}")
    return float(value)


def raise_if_refused(message: Mapping[str, Any]) -> None:
    """Raises CollectiveError with the reason that a refusing worker sent, if any."""
    if "refused" in message:
        raise CollectiveError(checked_text(message["refused"], MOST_REASON_CHARACTERS))


def sentence(reason: str) -> str:
    """Turns the reason that a worker gave into a sentence of its own."""
    return f"{reason[0].upper()}{reason[1:]}."


# Why worker 0 ends a rendezvous.


def missing_workers(missing: Sequence[int], workers: int) -> str:
    """The reason when workers did not arrive."""
    return (
        f"Not all {workers} workers came together: {name_workers(missing)} did not "
        "arrive at worker 0 in time. See their output; check that they can reach the "
        "coordinator's address."
    )


def setting_mismatch(rank: int, *settings: tuple[object, object, str]) -> str | None:
    """The reason when a (theirs, mine, name) of worker `rank` differs, else None."""
    for theirs, mine, name in settings:
        if theirs != mine:
            return (
                f"Worker {rank} says {name}={theirs}, worker 0 says {mine}. Start all "
                "workers with the same settings and the same tfdp."
            )
    return None


def rank_is_taken(rank: int, workers: int) -> str:
    """The reason when two workers have the same rank."""
    return (
        f"Two workers say that they are worker {rank} of {workers}. Give each process "
        "a rank of its own."
    )
