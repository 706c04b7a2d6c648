"""Restarts single workers while the others go on (`--restart one`).

For trainings whose workers can do without each other for a while: see
`Communication(min_hosts=...)`. The others decide about the membership.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from tfdp.cluster.progress import RESTARTS
from tfdp.launch.restart_policy import wait_seconds
from tfdp.launch.worker import Worker, WorkerCommand


class OneByOne:
    """Decides which workers are restarted, and when; `commands` are by rank."""

    def __init__(
        self,
        commands: Sequence[WorkerCommand],
        most_restarts: int,
        say: Callable[[list[str]], None],
    ):
        self._commands, self._most_restarts, self._say = commands, most_restarts, say
        self._used = 0
        #: When a replacement starts, by the process group of the worker that ended.
        self._due_seconds: dict[int, float] = {}
        self._times = [0] * len(commands)
        #: Process groups whose restart was reported as pointless.
        self._over: set[int] = set()

    def comes_again(self, worker: Worker, workers: Sequence[Worker]) -> bool:
        """Whether this worker has ended and is replaced: not if training is over."""
        if worker.is_running or not (worker.has_failed or worker.requests_restart):
            return False
        if worker.left_early:
            return False  # it would exit early again
        if not any(w.is_running for w in workers):
            done = [str(w.rank) for w in workers if w.has_ended_well]
            if done and worker.group not in self._over:
                self._over.add(worker.group)
                others = f"worker{'s' if len(done) > 1 else ''} {', '.join(done)}"
                end = f"{others} ended with exit code 0, and no other runs"
                self._say([f"worker {worker.rank} is not started again: {end}"])
            if done:
                return False
        if worker.group not in self._due_seconds and self._used < self._most_restarts:
            self._used += 1
            self._times[worker.rank] += 1
            wait = wait_seconds(self._times[worker.rank])
            self._due_seconds[worker.group] = time.monotonic() + wait
            how = worker.crash.error if worker.crash else worker.describe_end()
            ended = f"worker {worker.rank} has ended: {how}; the others go on"
            count = f"(restart {self._used} of {self._most_restarts})"
            again = f"starts worker {worker.rank} again in {wait:.1f} s {count}"
            self._say([ended, again])
        return worker.group in self._due_seconds

    def is_due(self, worker: Worker) -> bool:
        return time.monotonic() >= self._due_seconds[worker.group]

    def command(self, worker: Worker) -> WorkerCommand:
        first = self._commands[worker.rank]
        restarts = {RESTARTS: str(self._times[worker.rank])}
        return dataclasses.replace(first, environment={**first.environment, **restarts})
