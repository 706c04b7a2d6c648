"""Says at the end of a program that its strategy was made and trained nothing.

A model that is made outside of the scope trains on one device, without an error.
"""

from __future__ import annotations

import atexit
import functools
import sys
from typing import Any, NoReturn

__all__ = ["note_made", "note_used"]

_made: list[str] = []
_used: list[bool] = []
_exit_codes: list[Any] = []


def note_made(strategy: object, is_chief: bool) -> None:
    """Remembers that a strategy was made; of several workers the first one says it."""
    if is_chief and not _made and not _used:
        _made.append(repr(strategy))
        atexit.register(_say_if_unused)
        _note_exit_codes()


def note_used() -> None:
    """Some strategy was used: its scope, or a step of it; nothing is said then."""
    if not _used:
        _used.append(True)


def _note_exit_codes() -> None:
    """Lets `sys.exit` note its argument: no public name has it when a process ends."""
    leave = sys.exit

    @functools.wraps(leave)
    def noting(code: Any = None, /) -> NoReturn:
        _exit_codes.append(code)
        leave(code)

    sys.exit = noting


def _say_if_unused() -> None:
    has_failed = hasattr(sys, "last_type") or (_exit_codes and _exit_codes[-1])
    # A failure has a cause of its own; "ps1" is there where a person types commands.
    if _used or has_failed or hasattr(sys, "ps1"):
        return
    print(
        f"tfdp: {_made[0]} was made and never used, so nothing was trained on its "
        "replicas. Make and compile the model within `with strategy.scope():`.",
        file=sys.stderr,
    )
