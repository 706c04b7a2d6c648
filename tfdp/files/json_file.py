"""Writes JSON so that a reader never meets half a file."""

from __future__ import annotations

import json
import os
from typing import Any

from tfdp.files.atomic import replaced

__all__ = ["write_json"]


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes `value` as JSON to `path`, through a temporary name beside it.

    Raises:
      OSError: when the folder does not exist or cannot be written to.
    """
    with replaced(path) as half_written:
        half_written.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
