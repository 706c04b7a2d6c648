"""Ends a command's process."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Ends the process; at once if a script was run in it.

    Its threads would keep the process alive, and its exit handlers could save the
    untrained model over a trained one.
    """
    if "tfdp.tools.commands.script_fit" not in sys.modules:
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
