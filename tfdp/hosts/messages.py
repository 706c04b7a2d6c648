"""What comes in a message is what it must be, or a ValueError: never used unchecked."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tfdp.checks import is_number, is_whole
from tfdp.errors import CollectiveError

# Of the reason that another worker gives.
MOST_REASON_CHARACTERS = 4096
Read = TypeVar("Read")


def parse_object(line: bytes | bytearray) -> dict[str, Any]:
    """A JSON object.

    Raises:
      ValueError: when it is not one, or nested too deeply.

    >>> parse_object(b'{"rank": 1}')
    {'rank': 1}
    """
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
    """What worker `rank` has sent to all, as `read` makes it of the bytes.

    Raises:
      CollectiveError: when it is nothing of the kind.

    >>> read_as(struct.Struct("<B").unpack, b"5", 1, "number")
    (53,)
    """
    try:
        return read(data)
    # Of text, JSON and NumPy; of structs; of what is nested too deeply, or lacks parts.
    except (ValueError, struct.error, RecursionError, TypeError, LookupError) as error:
        raise CollectiveError(
            f"Worker {rank} sent no {what}, but {len(data)} bytes that cannot be read "
            f"as one ({error}): it runs another program or another tfdp, or the "
            "network damages data. Communication(checksum=True) tells which."
        ) from error


def checked_integer(value: object, least: int, most: int) -> int:
    """The value, if it is an integer from `least` to `most`.

    Raises:
      ValueError: when it is not; True is no integer.
    """
    if not is_whole(value, least, most):
        raise ValueError(f"not an integer from {least} to {most}")
    return value


def checked_text(value: object, most_characters: int) -> str:
    """The value, if it is a text of at most so many characters.

    Raises:
      ValueError: when it is not.
    """
    if not isinstance(value, str) or len(value) > most_characters:
        raise ValueError(f"not a text of at most {most_characters} characters")
    return value


def checked_seconds(value: object, most: float) -> float:
    """The value, if it is a number from 0 to `most`.

    Raises:
      ValueError: when it is not.
    """
    if not is_number(value) or not 0 <= value <= most:
        raise ValueError(f"not a number from 0 to {most:g}")
    return float(value)


def raise_if_refused(message: Mapping[str, Any]) -> None:
    """Ends with the reason that another worker gives.

    Raises:
      CollectiveError: it refuses this one.
      ValueError: it gives no reason in words.
    """
    if "refused" in message:
        raise CollectiveError(checked_text(message["refused"], MOST_REASON_CHARACTERS))


def sentence(reason: str) -> str:
    """What a worker gives for a reason, as an error says it by itself.

    >>> sentence("the workers differ")
    'The workers differ.'
    """
    return f"{reason[0].upper()}{reason[1:]}."
