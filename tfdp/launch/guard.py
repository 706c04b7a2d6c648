"""Stops the workers when their launcher is killed: no worker outlives it.

A launcher that is killed with SIGKILL can stop nothing any more. So it starts this
program first, as a session of its own, and holds the only writing end of its standard
input. Through it come lines "+GROUP" and "-GROUP", the process groups that run and that
are gone. When the input ends, however that came about, the groups that are left get
SIGTERM and, `grace_seconds` later, SIGKILL. Whole groups: what a worker has started
goes with it. Then strays: what a worker has started in a session of its own, which no
group holds. They are known by what every process inherits, the launcher's folder among
its environment variables. The launcher's own folder goes last.

Linux's PR_SET_PDEATHSIG would do without a watcher, but it reaches the worker alone and
not what the worker has started.

Runs as a script, so that it imports nothing of the package and starts at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from types import TracebackType

#: Of the name of the folder that the launcher gives to its guard.
FOLDER_PREFIX = "tfdp-launch-"
#: Where a worker finds the folder; `tfdp.hosts.crash_report` has it as well.
FOLDER_VARIABLE = "TFDP_LAST_WORDS"
POLL_SECONDS = 0.05


def signal_group(group: int, number: int) -> None:
    """Sends a signal to a process group; a group that is gone is no error."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass


def group_exists(group: int) -> bool:
    """Whether any process of the group is left."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def signal_strays(folder: str, number: int) -> int:
    """Sends a signal to all processes that workers of a launcher have started.

    Args:
      folder: the launcher's, or that of one of its starts.
      number: of the signal; 0 sends none.

    Returns:
      How many there are; 0 where the system does not tell (it is not Linux).
    """
    if not hasattr(os, "pidfd_open") or not os.path.isdir("/proc/self"):
        return 0
    found = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            # Held before it is looked at: the number may be somebody else's by then.
            held = os.pidfd_open(int(name))
        except OSError:
            continue
        try:
            if _is_of(name, folder):
                signal.pidfd_send_signal(held, number)
                found += 1
        except OSError:
            pass  # it is gone, or somebody else's
        finally:
            os.close(held)
    return found


def _is_of(pid: str, folder: str) -> bool:
    with open(f"/proc/{pid}/environ", "rb") as file:
        variables = file.read().split(b"\0")
    mark = f"{FOLDER_VARIABLE}={folder}".encode()
    return any(v == mark or v.startswith(mark + b"/") for v in variables)


class OrphanGuard:
    """The launcher's side: starts the watcher and tells it of the groups."""

    def __init__(self, grace_seconds: float, folder: str):
        self._process = subprocess.Popen(
            # Isolated and without site-packages: it starts in milliseconds.
            [sys.executable, "-I", "-S", __file__, str(grace_seconds), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        """From now on the group dies with the launcher."""
        self._tell(f"+{group}\n")

    def release(self, group: int) -> None:
        """The group is gone; its number may belong to somebody else soon."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        stdin = self._process.stdin
        if stdin is None:
            return
        try:
            stdin.write(line.encode())
            stdin.flush()
        except BrokenPipeError:
            pass  # somebody killed the watcher; the workers run on

    def __enter__(self) -> OrphanGuard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def _main(grace_seconds: float, folder: str) -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        if line.startswith("+"):
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    for group in groups:
        signal_group(group, signal.SIGTERM)
        signal_group(group, signal.SIGCONT)
    deadline = time.monotonic() + grace_seconds
    while any(map(group_exists, groups)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for group in groups:
        signal_group(group, signal.SIGKILL)
    if signal_strays(folder, signal.SIGTERM):
        deadline = time.monotonic() + grace_seconds
        while signal_strays(folder, 0) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        signal_strays(folder, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main(float(sys.argv[1]), sys.argv[2])
