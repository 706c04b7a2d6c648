"""Writes JSON so that a reader never meets half a file."""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
from typing import Any

__all__ = ["write_json"]


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes `value` as JSON to `path`, through a temporary name beside it.

    Raises:
      OSError: when the folder does not exist or cannot be written to.
    """
    target = pathlib.Path(path)
    descriptor, temporary = tempfile.mkstemp(
        dir=target.parent, prefix=f".{target.name}.", suffix=".part"
    )
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.write("\n")
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
