"""A line of a run's file: JSON with a checksum, so that damage is seen line by line.

A file that grows while a training runs cannot be replaced as a whole, and a process may
be killed in the middle of a line. So each line stands for itself: what is damaged is
left out and counted, and the rest is read.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from typing import Any

from tfdp.files.checked_json import parse_json

#: What the first line of a start says it is, and which version.
KIND, VERSION = "tfdp run record", 1
#: Longer ones are not read.
MOST_LINE_BYTES = 256 * 1024
# The end of each line; what it is the checksum of comes before.
ENDING = re.compile(rb',"crc":"([0-9a-f]{8})"\}$')
WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def line_of(content: Mapping[str, Any]) -> bytes:
    """The line that says `content`, with its end.

    Args:
      content: what JSON can hold. Numbers that are not finite become words, which other
        readers of JSON take as well.
    """
    text = json.dumps(_in_words(dict(content)), separators=(",", ":"), allow_nan=False)
    body = text[:-1].encode()
    return body + b',"crc":"%08x"}\n' % zlib.crc32(body)


def content_of(line: bytes) -> dict[str, Any]:
    """What a line says.

    Raises:
      ValueError: it is torn, damaged or none of tfdp's.

    >>> content_of(line_of({"kind": "end", "seconds": 2.5}))
    {'kind': 'end', 'seconds': 2.5}
    """
    line = line.rstrip(b"\r\n")
    found = ENDING.search(line)
    if found is None:
        raise ValueError("it has no checksum at its end")
    body = line[: found.start()]
    if int(found[1], 16) != zlib.crc32(body):
        raise ValueError("its checksum is another one")
    content = parse_json(body + b"}")
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return content


def number_of(value: object) -> object:
    """The number that a word stands for; another value as it is."""
    return WORDS.get(value, value) if isinstance(value, str) else value


def _in_words(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(name): _in_words(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_in_words(each) for each in value]
    return value
