"""The other end of `tfdp launch --hosts`: one worker, for as long as stdin is open.

`python -m tfdp.launch.remote GRACE_SECONDS COMMAND...`; the first line of standard
input is the job's key.
"""

from __future__ import annotations

import os
import sys

from tfdp.cluster.job_key import JOB_KEY, checked_job_key
from tfdp.errors import ClusterError
from tfdp.launch.supervise import supervise
from tfdp.launch.worker import WorkerCommand

__all__ = ["main"]

MOST_LINE_BYTES = 1024


def _first_line(descriptor: int) -> str:
    """Byte by byte: what follows is not for this reader."""
    line = b""
    while len(line) < MOST_LINE_BYTES:
        byte = os.read(descriptor, 1)
        if byte in (b"", b"\n"):
            break
        line += byte
    return line.decode("ascii", "replace")


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    grace_seconds, command = float(arguments[0]), arguments[1:]
    try:
        key = checked_job_key(
            _first_line(sys.stdin.fileno()), "the first line of input"
        )
    except ClusterError as error:
        print(f"tfdp: {error}", file=sys.stderr)
        return 1
    return supervise(
        [WorkerCommand(0, command, {**os.environ, JOB_KEY: key})],
        grace_seconds=grace_seconds,
        show_ranks=False,
        end_of_stdin_stops=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
