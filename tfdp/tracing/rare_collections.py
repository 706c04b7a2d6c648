"""Python's search for circles of garbage, seldom while a large step is traced.

A trace leaves millions of objects that stay, and Python looks through them again and
again for what nobody holds any more.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collected_rarely"]

# Objects more than were given back, after which Python looks; its own number is 700.
OBJECTS = 200_000


@contextlib.contextmanager
def collected_rarely() -> Iterator[None]:
    """While this lasts Python looks for garbage after 200,000 new objects, not 700.

    Of the whole process; what was set before comes back. Who has switched the search
    off, or made it rarer, is left alone.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < OBJECTS:
        yield
        return
    gc.set_threshold(OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
