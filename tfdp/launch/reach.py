"""Which hosts answer: asked before workers start again."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence

from tfdp.launch.guard import OrphanGuard
from tfdp.launch.ssh import CONNECT_SECONDS, SSH
from tfdp.launch.worker import SSH_ERROR

__all__ = ["answering_hosts"]

POLL_SECONDS = 0.05
# After the connection: for a shell to start there, on a busy machine.
SHELL_SECONDS = 30.0


def answering_hosts(
    hosts: Sequence[str],
    environment: Mapping[str, str],
    guard: OrphanGuard,
    received: Sequence[int],
) -> list[str]:
    """Those of the hosts on which ssh runs a command; all are asked at once.

    Args:
      environment: of the ssh processes.
      guard: ends them when the launcher is killed.
      received: signals, a list that grows; one ends the asking.
    """
    asked = [
        subprocess.Popen(
            [*SSH, host, "true"],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for host in hosts
    ]
    for process in asked:
        guard.watch(process.pid)
    deadline = time.monotonic() + CONNECT_SECONDS + SHELL_SECONDS
    while any(process.poll() is None for process in asked):
        if received or time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    answers = [process.poll() not in (None, SSH_ERROR) for process in asked]
    for process in asked:
        if process.poll() is None:
            process.kill()
            process.wait()
        guard.release(process.pid)
    return [host for host, answers in zip(hosts, answers, strict=True) if answers]
