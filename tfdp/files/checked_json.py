"""JSON from outside, and JSON files that say when they were changed. Pure.

What `json` raises for text from a stranger is not always a `ValueError`, and a changed
digit is good JSON: so a file holds a checksum of what it says.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from tfdp.checks import is_whole
from tfdp.files.atomic import replaced

# What a file system takes as one name, in bytes.
LONGEST_NAME_BYTES = 255
# What a signed number of 64 bits holds: sizes and counts are handed on as such.
LARGEST_COUNT = 2**63 - 1


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
      ValueError: it is none, is nested too deeply, or holds a number of thousands of
        digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        # Not as the cause: its traceback has a thousand lines.
        raise ValueError("it is nested too deeply") from None


def checksum_of(content: dict[str, Any]) -> str:
    """32 hexadecimal digits over all fields but `checksum`, however they are laid out.

    Raises:
      ValueError: a value is nested too deeply.

    >>> checksum_of({"a": 1, "b": 2}) == checksum_of({"b": 2, "a": 1, "checksum": "x"})
    True
    """
    fields = {name: value for name, value in content.items() if name != "checksum"}
    try:
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def with_checksum(content: dict[str, Any]) -> str:
    """The text of a file that holds `content` and its checksum."""
    whole = {**content, "checksum": checksum_of(content)}
    return json.dumps(whole, indent=1) + "\n"


def is_plain_name(name: object) -> bool:
    """Whether `name` can only mean a file right in the folder it is looked up in.

    >>> [is_plain_name(name) for name in ("a-1.keras", "../a", "/a", "..", "", 1)]
    [True, False, False, False, False, False]
    """
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    # "\\" separates folders elsewhere, NUL ends a name, ":" starts a drive or a URL.
    if any(sign in name for sign in "/\\\0:"):
        return False
    try:
        return len(name.encode()) <= LONGEST_NAME_BYTES
    except UnicodeEncodeError:
        return False


def is_count(value: object, least: int = 0) -> bool:
    """Whether it is a whole number from `least` that 63 bits hold, and no bool."""
    return is_whole(value, least, LARGEST_COUNT)


# Writes JSON so that a reader never meets half a file.


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes `value` as JSON to `path`, through a temporary name beside it.

    Raises:
      OSError: when the folder does not exist or cannot be written to.
    """
    with replaced(path) as half_written:
        half_written.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
