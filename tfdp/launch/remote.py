"""The remote end of `tfdp launch --hosts`: one worker, while stdin is open.

`python -m tfdp.launch.remote GRACE_SECONDS COMMAND...`; the first line of standard
input is the job's key.
"""

from __future__ import annotations

import os
import sys

from tfdp.cluster.job_key import JOB_KEY, checked_job_key
from tfdp.errors import ClusterError
from tfdp.launch.console import Console
from tfdp.launch.group import Group
from tfdp.launch.guard import OrphanGuard
from tfdp.launch.output import CRASH_MARK, PROGRESS_MARK
from tfdp.launch.own_folder import OwnFolder
from tfdp.launch.signals import received_signals
from tfdp.launch.worker import WorkerCommand

MOST_LINE_BYTES = 1024


def _first_line(descriptor: int) -> str:
    """Read byte by byte, to leave the rest of the input unread."""
    line = b""
    while len(line) < MOST_LINE_BYTES:
        byte = os.read(descriptor, 1)
        if byte in (b"", b"\n"):
            break
        line += byte
    return line.decode("ascii", "replace")


def main(arguments: list[str]) -> int:
    """Runs the command; returns `Group.exit_code`."""
    grace_seconds, command = float(arguments[0]), arguments[1:]
    try:
        line = _first_line(sys.stdin.fileno())
        key = checked_job_key(line, "the first line of input")
    except ClusterError as error:
        print(f"tfdp: {error}", file=sys.stderr)
        return 1
    worker = WorkerCommand(0, command, {**os.environ, JOB_KEY: key})
    return _watch(worker, grace_seconds)


def _watch(command: WorkerCommand, grace_seconds: float) -> int:
    with (
        received_signals() as received,
        OwnFolder() as own_folder,
        OrphanGuard(grace_seconds, own_folder.path) as guard,
    ):
        console = Console()
        folder = own_folder.begin_start(console.say)
        group = Group(guard, console, folder, grace_seconds, received, show_ranks=False)
        sent: tuple[int | None, bool] | None = None

        def send_news() -> None:
            """Reports a resume or a new strategy, but not each step."""
            nonlocal sent
            progress = group.workers[0].progress
            if progress is not None:
                last, sent = (
                    sent,
                    (progress.strategies, progress.resumed_step is not None),
                )
                if sent != last:
                    _report(console, PROGRESS_MARK, progress.to_text())

        group.run([command], end_of_stdin_stops=True, each_turn=send_news)
        worker = group.workers[0]
        progress, crash = worker.progress, worker.crash
        if progress is not None:
            _report(console, PROGRESS_MARK, progress.to_text())
        if crash is not None:
            _report(console, CRASH_MARK, crash.to_json())
        console.write_the_rest(received)
        return group.exit_code()


def _report(console: Console, mark: bytes, text: str) -> None:
    # The worker's output is relayed in whole lines, so this is a line of its own.
    console.stderr.drops = False
    console.stderr.write(mark + text.encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
