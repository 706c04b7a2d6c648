"""A line of a run's file: JSON with a checksum, so damage is detected per line.

The file grows during training and a process may be killed within a line, so the file is
never replaced as a whole; readers skip and count damaged lines.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from typing import Any

from tfdp.files.checked_json import finite, parse_json

KIND, VERSION = "tfdp run record", 1
#: Longer lines are not read.
MOST_LINE_BYTES = 256 * 1024
# Ends each line: the checksum of everything before it.
ENDING = re.compile(rb',"crc":"([0-9a-f]{8})"\}$')
WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def line_of(content: Mapping[str, Any]) -> bytes:
    """Serializes `content` as one line; numbers that are not finite become words."""
    text = json.dumps(finite(dict(content)), separators=(",", ":"), allow_nan=False)
    body = text[:-1].encode()
    return body + b',"crc":"%08x"}\n' % zlib.crc32(body)


def content_of(line: bytes) -> dict[str, Any]:
    """Parses a line; raises ValueError if it is torn, damaged or not tfdp's.

    >>> content_of(line_of({"kind": "end", "seconds": 2.5}))
    {'kind': 'end', 'seconds': 2.5}
    """
    line = line.rstrip(b"\r\n")
    found = ENDING.search(line)
    if found is None:
        raise ValueError("it has no checksum at its end")
    body = line[: found.start()]
    if int(found[1], 16) != zlib.crc32(body):
        raise ValueError("its checksum does not match")
    content = parse_json(body + b"}")
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return content


def number_of(value: object) -> object:
    """The number that a word such as "nan" stands for; other values unchanged."""
    return WORDS.get(value, value) if isinstance(value, str) else value
