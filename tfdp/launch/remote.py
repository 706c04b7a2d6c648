"""The other end of `tfdp launch --hosts`: one worker, for as long as stdin is open.

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
from tfdp.launch.output import LAST_WORDS_MARK, PROGRESS_MARK
from tfdp.launch.own_folder import OwnFolder
from tfdp.launch.signals import received_signals
from tfdp.launch.worker import WorkerCommand

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
    """Runs the command; returns its exit code, as `Group.exit_code`."""
    grace_seconds, command = float(arguments[0]), arguments[1:]
    try:
        key = checked_job_key(
            _first_line(sys.stdin.fileno()), "the first line of input"
        )
    except ClusterError as error:
        print(f"tfdp: {error}", file=sys.stderr)
        return 1
    return _watch(
        WorkerCommand(0, command, {**os.environ, JOB_KEY: key}),
        grace_seconds=grace_seconds,
    )


def _watch(command: WorkerCommand, *, grace_seconds: float) -> int:
    """Runs the worker; tells of its progress, and what it died of, on stderr."""
    with (
        received_signals() as received,
        OwnFolder() as own_folder,
        OrphanGuard(grace_seconds, own_folder.path) as guard,
    ):
        console = Console()
        folder = own_folder.begin_start(console.say)
        group = Group(guard, console, folder, grace_seconds, received, show_ranks=False)
        told: tuple[int | None, bool] | None = None

        def send_news() -> None:
            """That it goes on, and that it makes a strategy; not each of its steps."""
            nonlocal told
            progress = group.workers[0].progress
            if progress is not None:
                news = progress.strategies, progress.resumed_step is not None
                if news != told:
                    told = news
                    _tell(console, PROGRESS_MARK, progress.to_json())

        group.run([command], end_of_stdin_stops=True, each_turn=send_news)
        worker = group.workers[0]
        progress, words = worker.progress, worker.last_words
        if progress is not None:
            _tell(console, PROGRESS_MARK, progress.to_json())
        if words is not None:
            _tell(console, LAST_WORDS_MARK, words.to_json())
        console.write_the_rest(received)
        return group.exit_code()


def _tell(console: Console, mark: bytes, text: str) -> None:
    # Only whole lines of the worker are passed on, so this is one, too.
    console.stderr.drops = False
    console.stderr.write(mark + text.encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
