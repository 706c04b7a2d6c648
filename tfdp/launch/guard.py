"""Stops the workers if their launcher is killed: no worker outlives it.

The launcher, which SIGKILL may end at any time, starts this program in a session of its
own and holds its standard input. Lines "+GROUP" and "-GROUP" name process groups that
started and ended. When the input ends, the remaining groups get SIGTERM and, after
`grace_seconds`, SIGKILL; then strays, which workers started in sessions of their own:
they inherit the launcher's folder in a variable. The folder is removed last.

Linux's PR_SET_PDEATHSIG would not reach a worker's children. Runs as a script that
imports nothing of the package, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

FOLDER_PREFIX = "tfdp-launch-"  # name prefix of the launcher's folder
#: The variable with the folder's path; also in `tfdp.cluster.crash_report`.
FOLDER_VARIABLE = "TFDP_LAST_WORDS"
POLL_SECONDS = 0.05


def signal_group(group: int, number: int) -> None:
    """Sends a signal to a process group, if it exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def group_exists(group: int) -> bool:
    """Whether any process of the group is left."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def signal_strays(folder: str, number: int) -> int:
    """Sends a signal (0: none) to all processes that inherited a launcher's folder.

    Returns their number; 0 on systems other than Linux.
    """
    if not hasattr(os, "pidfd_open") or not os.path.isdir("/proc/self"):
        return 0
    found = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            # Opened before the check: the id may be reused meanwhile.
            held = os.pidfd_open(int(name))
        except OSError:
            continue
        try:
            if _is_of(name, folder):
                signal.pidfd_send_signal(held, number)
                found += 1
        except OSError:
            pass  # it is gone, or another user's
        finally:
            os.close(held)
    return found


def _is_of(pid: str, folder: str) -> bool:
    with open(f"/proc/{pid}/environ", "rb") as file:
        variables = file.read().split(b"\0")
    mark = f"{FOLDER_VARIABLE}={folder}".encode()
    return any(v == mark or v.startswith(mark + b"/") for v in variables)


class OrphanGuard:
    """The launcher's side: starts the watcher and sends it the groups."""

    def __init__(self, grace_seconds: float, folder: str):
        self._process = subprocess.Popen(
            # Isolated and without site-packages: starts in milliseconds.
            [sys.executable, "-I", "-S", __file__, str(grace_seconds), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        """Kills the group if the launcher dies, from now on."""
        self._send(f"+{group}\n")

    def release(self, group: int) -> None:
        """Forgets the group, as its id may be reused."""
        self._send(f"-{group}\n")

    def _send(self, line: str) -> None:
        stdin = self._process.stdin
        if stdin is None:
            return
        try:
            stdin.write(line.encode())
            stdin.flush()
        except BrokenPipeError:
            pass  # the watcher was killed; the workers run on

    def __enter__(self) -> OrphanGuard:
        return self

    def __exit__(self, *_: object) -> None:
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
