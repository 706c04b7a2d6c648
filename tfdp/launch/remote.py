"""The other end of `tfdp launch --hosts`: one worker, for as long as stdin is open.

`python -m tfdp.launch.remote GRACE_SECONDS COMMAND...`
"""

from __future__ import annotations

import os
import sys

from tfdp.launch.supervise import supervise
from tfdp.launch.worker import WorkerCommand

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    grace_seconds, command = float(arguments[0]), arguments[1:]
    return supervise(
        [WorkerCommand(0, command, os.environ)],
        grace_seconds=grace_seconds,
        show_ranks=False,
        end_of_stdin_stops=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
