"""Says at the end of a program that its strategy was made and trained nothing.

A model that is made outside of the scope trains on one device, without an error.
"""

from __future__ import annotations

import atexit
import sys

_made: list[str] = []
_used: list[bool] = []


def note_made(strategy: object, is_chief: bool) -> None:
    """Remembers that a strategy was made; of several workers the first one says it."""
    if is_chief and not _made and not _used:
        _made.append(repr(strategy))
        atexit.register(_say_if_unused)


def note_used() -> None:
    """Some strategy was used: its scope, or a step of it; nothing is said then."""
    if not _used:
        _used.append(True)


def _say_if_unused() -> None:
    # Who was ended by an error, or tries things out by hand, knows why.
    if _used or hasattr(sys, "last_type") or hasattr(sys, "ps1"):
        return
    print(
        f"tfdp: {_made[0]} was made and never used, so nothing was trained on its "
        "replicas. Make and compile the model within `with strategy.scope():`.",
        file=sys.stderr,
    )
