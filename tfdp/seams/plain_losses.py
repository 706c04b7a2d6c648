"""Losses that a replica takes as one device does: for libraries that combine them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_here = threading.local()


def is_plain() -> bool:
    """Whether the calling thread is within `plain_losses`."""
    return getattr(_here, "is_plain", False)


@contextlib.contextmanager
def plain_losses() -> Iterator[None]:
    """Within this, losses of the calling thread's replica are means of its own rows."""
    _here.is_plain = True
    try:
        yield
    finally:
        _here.is_plain = False
