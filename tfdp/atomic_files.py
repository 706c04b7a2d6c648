"""Files that a reader never meets half written. Pure; no framework is imported."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["replaced"]


@contextlib.contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name beside `path` to write to; the file takes its place at the end.

    The name ends as `path` does, which tells some writers the format. After an error
    nothing of it is left, and `path` is what it was.

    Raises:
      OSError: when it cannot take the place of `path`.
    """
    target = Path(path)
    half_written = target.with_name(f".writing-{os.getpid()}-{target.name}")
    try:
        yield half_written
        os.replace(half_written, target)
    finally:
        half_written.unlink(missing_ok=True)
