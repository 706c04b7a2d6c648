"""Workers that start again one by one while the others go on (`--restart one`).

For trainings whose workers live without each other for a while: see
`Communication(min_hosts=...)`. Which worker came back is up to the others.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from tfdp.cluster.progress import RESTARTS
from tfdp.launch.restart_policy import wait_seconds
from tfdp.launch.worker import Worker, WorkerCommand


class OneByOne:
    """Which workers start again, and when.

    Args:
      commands: how each worker was started, by rank.
      most_restarts: of all workers together, at least 1.
      say: is given lines for people.
    """

    def __init__(
        self,
        commands: Sequence[WorkerCommand],
        most_restarts: int,
        say: Callable[[list[str]], None],
    ):
        self._commands, self._most_restarts, self._say = commands, most_restarts, say
        self._used = 0
        #: When a worker that has ended starts again, by its process group.
        self._due_seconds: dict[int, float] = {}
        self._times = [0] * len(commands)
        #: Process groups of which was said that the training has ended without them.
        self._over: set[int] = set()

    def comes_again(self, worker: Worker, workers: Sequence[Worker]) -> bool:
        """Whether this worker has ended, and another process takes its place.

        None does once the training has ended: nobody else runs, and one has come to
        its good end.

        Args:
          worker: which.
          workers: all of them.
        """
        if worker.is_running or not (worker.has_failed or worker.requests_restart):
            return False
        if worker.left_early:
            return False  # it would do that again
        if not any(w.is_running for w in workers):
            done = [str(w.rank) for w in workers if w.has_ended_well]
            if done:
                self._say_that_it_is_over(worker, done)
                return False
        if worker.group not in self._due_seconds and self._used < self._most_restarts:
            self._used += 1
            self._times[worker.rank] += 1
            wait = wait_seconds(self._times[worker.rank])
            self._due_seconds[worker.group] = time.monotonic() + wait
            words = worker.last_words
            how = words.error if words else worker.describe_end()
            self._say(
                [
                    f"worker {worker.rank} has ended: {how}; the others go on",
                    f"starts worker {worker.rank} again in {wait:.1f} s "
                    f"(restart {self._used} of {self._most_restarts})",
                ]
            )
        return worker.group in self._due_seconds

    def _say_that_it_is_over(self, worker: Worker, done: Sequence[str]) -> None:
        if worker.group not in self._over:
            self._over.add(worker.group)
            others = "worker" if len(done) == 1 else "workers"
            self._say(
                [
                    f"worker {worker.rank} is not started again: {others} "
                    f"{', '.join(done)} ended with exit code 0, and no other runs"
                ]
            )

    def is_due(self, worker: Worker) -> bool:
        """Whether it starts again now."""
        return time.monotonic() >= self._due_seconds[worker.group]

    def command(self, worker: Worker) -> WorkerCommand:
        """How it starts again: in the same place, with the same key."""
        first = self._commands[worker.rank]
        restarts = {RESTARTS: str(self._times[worker.rank])}
        return dataclasses.replace(first, environment={**first.environment, **restarts})
