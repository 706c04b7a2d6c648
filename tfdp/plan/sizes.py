"""Sizes of memory as people write them. Pure."""

from __future__ import annotations

import re
from fractions import Fraction

from tfdp.errors import ConfigurationError

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
# More than any machine has; larger numbers may overflow a float.
MOST_BYTES, MOST_CHARACTERS = 10**18, 80


def bytes_of(text: str) -> int:
    """Parses a size of at most a million terabytes.

    >>> bytes_of("16GB"), bytes_of("1.5 KiB")
    (16000000000, 1536)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", text.upper())
    unit = found[2] if found else ""
    if found and not unit and len(text) <= MOST_CHARACTERS:
        raise ConfigurationError(
            f"{text.strip()} what? A size is a number and a unit: {found[1]}GB, or "
            f"{found[1]}GiB, MB, MiB, B."
        )
    if found and unit not in UNITS:
        unit += "B"  # 16G
    size_bytes = 0
    if found and unit in UNITS and len(text) <= MOST_CHARACTERS:
        size_bytes = round(Fraction(found[1]) * UNITS[unit])
    if not 1 <= size_bytes <= MOST_BYTES:
        shown = text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
        raise ConfigurationError(
            "A size is a number and a unit, such as 16GB or 512MiB, and from 1 byte to "
            f"{MOST_BYTES // UNITS['TB']:,} TB. Received: {shown!r}."
        )
    return size_bytes
