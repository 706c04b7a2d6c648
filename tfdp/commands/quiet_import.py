"""Imports TensorFlow for a command without the lines that its libraries print.

TensorFlow 2.21 writes a notice on oneDNN to the terminal twice while it loads, which
no environment variable turns off. A command's output should be the command's.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile

__all__ = ["import_tensorflow_quietly"]

STDERR_DESCRIPTOR = 2


def import_tensorflow_quietly() -> None:
    """Imports TensorFlow while the process' standard error goes to a file.

    Native libraries write past `sys.stderr`, so the descriptor itself is redirected.
    When the import fails, what was written is shown.

    Raises:
      ImportError: as TensorFlow raises it.
    """
    # Whoever has set a level keeps it.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.stderr.flush()
    terminal = os.dup(STDERR_DESCRIPTOR)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), STDERR_DESCRIPTOR)
        try:
            importlib.import_module("tensorflow")
        except BaseException:
            captured.seek(0)
            os.write(terminal, captured.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(terminal, STDERR_DESCRIPTOR)
            os.close(terminal)
