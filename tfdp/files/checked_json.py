"""JSON from untrusted sources, and JSON files with a checksum. Pure.

`json` does not always raise ValueError for bad text, and a changed digit is still valid
JSON: so a file holds a checksum of its content.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable
from typing import Any, BinaryIO

from tfdp.checks import is_whole
from tfdp.files.atomic import replaced

LONGEST_NAME_BYTES = 255  # the longest file name of common file systems, in bytes
LARGEST_COUNT = 2**63 - 1  # sizes and counts are stored as signed 64-bit numbers


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; raises ValueError if it is invalid or too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        # Without the cause: its traceback has a thousand lines.
        raise ValueError("it is nested too deeply") from None


def finite(value: Any, instead: Callable[[float], Any] = str) -> Any:
    """Plain data in which `instead` replaces numbers that are not finite.

    >>> finite({"a": [1.5, float("inf")]})
    {'a': [1.5, 'inf']}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return instead(value)
    if isinstance(value, dict):
        return {str(name): finite(each, instead) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each, instead) for each in value]
    return value


def open_regular_file(path: str | os.PathLike[str], flags: int = 0) -> BinaryIO:
    """Opens a file to read; OSError for a pipe, which could block, or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "it is no regular file")
    return os.fdopen(descriptor, "rb")


def checksum_of(content: dict[str, Any]) -> str:
    """32 hexadecimal digits over all fields but `checksum`, in any order."""
    fields = {name: value for name, value in content.items() if name != "checksum"}
    try:
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def with_checksum(content: dict[str, Any]) -> str:
    """JSON text of `content` with its checksum."""
    whole = {**content, "checksum": checksum_of(content)}
    return json.dumps(whole, indent=1) + "\n"


def is_plain_name(name: object) -> bool:
    """Whether `name` can only name a file directly in its folder.

    >>> [is_plain_name(name) for name in ("a-1.keras", "../a", "/a", "..", "", 1)]
    [True, False, False, False, False, False]
    """
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    # Also "\\" (Windows), NUL (ends a name) and ":" (a drive or a URL).
    if any(sign in name for sign in "/\\\0:"):
        return False
    try:
        return len(name.encode()) <= LONGEST_NAME_BYTES
    except UnicodeEncodeError:
        return False


def is_count(value: object, least: int = 0) -> bool:
    """Whether it is an integer (no bool) from `least` that 63 bits hold."""
    return is_whole(value, least, LARGEST_COUNT)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes `value` as JSON to `path`, atomically."""
    with replaced(path) as half_written:
        half_written.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
