"""Starts hosts that may die, brings back who has died, wakes who was stopped."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from tests.support.package_source import REPOSITORY
from tests.support.workers import LONGEST_SECONDS, end, free_port


class LivingGroup:
    """Processes of a program under TFDP_* variables, and what becomes of them.

    Args:
      workers: how many.
      module: of this repository.
      folder: its first argument, for what it notes; the outputs are kept there, too.
      arguments: the others.
      comes_back: whether a process that was killed is started again.
      sleep_seconds: how long one that has stopped itself stays so.
      variables: more environment variables.
    """

    def __init__(
        self,
        workers,
        module,
        folder,
        *arguments,
        comes_back=False,
        sleep_seconds=6.0,
        variables=None,
    ):
        self.folder = pathlib.Path(folder)
        self._module, self._arguments = module, arguments
        self._comes_back, self._sleep_seconds = comes_back, sleep_seconds
        self._environment = {
            **os.environ,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TFDP_WORKERS": str(workers),
            "TFDP_COORDINATOR": f"127.0.0.1:{free_port()}",
            "TFDP_JOB_KEY": "a-key-of-this-test-only",
            **(variables or {}),
        }
        self._starts = 0
        self.processes = [self._start(rank) for rank in range(workers)]
        self._asleep = {}

    def _start(self, rank):
        self._starts += 1
        words = ["-m", self._module, self.folder, *self._arguments]
        with (self.folder / f"output.{rank}.{self._starts}").open("w") as output:
            return subprocess.Popen(
                [sys.executable, *map(str, words)],
                cwd=REPOSITORY,
                env=self._environment | {"TFDP_RANK": str(rank)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def run(self, seconds=LONGEST_SECONDS):
        """To the end of all; returns the exit codes, of the last in each place."""
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in self.processes):
            assert time.monotonic() < deadline, self.outputs()
            self._wake()
            for rank, process in enumerate(self.processes):
                if process.poll() == -signal.SIGKILL and self._comes_back:
                    self.processes[rank] = self._start(rank)
            time.sleep(0.05)
        return [process.returncode for process in self.processes]

    def _wake(self):
        for mark in self.folder.glob("stop.*"):
            since = self._asleep.setdefault(mark.name, time.monotonic())
            if since is not None and time.monotonic() > since + self._sleep_seconds:
                self._asleep[mark.name] = None
                os.kill(int(mark.read_text()), signal.SIGCONT)

    def outputs(self):
        """What all have printed, for messages."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}"
            for path in sorted(self.folder.glob("output.*"))
        )

    def lines(self):
        """What all have noted, by (rank, number of the process)."""
        return {
            tuple(map(int, path.name.split(".")[:2])): [
                json.loads(line) for line in path.read_text().splitlines()
            ]
            for path in sorted(self.folder.glob("*.jsonl"))
        }

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            end(process)
