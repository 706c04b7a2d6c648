"""Starts the workers of a test: Python programs that find each other by TFDP_*."""

import os
import signal
import socket
import subprocess
import sys

from tests.support.package_source import REPOSITORY

#: Only there to end a hang. Nothing takes so long, on any machine under any load.
LONGEST_SECONDS = 900


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def end(process):
    """Ends a process, also one that is stopped."""
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.kill()
    process.wait()


class Workers:
    """Processes that run `python -m module arguments`, killed at the end at the latest.

    Args:
      workers: how many.
      module: a module of this repository.
      arguments: its arguments, alike for all.
      variables: more environment variables, alike for all.
    """

    def __init__(self, workers, module, *arguments, variables=None):
        self.coordinator = f"127.0.0.1:{free_port()}"
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                cwd=REPOSITORY,
                env={
                    **os.environ,
                    "TF_CPP_MIN_LOG_LEVEL": "3",
                    "TFDP_WORKERS": str(workers),
                    "TFDP_RANK": str(rank),
                    "TFDP_COORDINATOR": self.coordinator,
                    **(variables or {}),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(workers)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            end(process)
            process.stdout.close()

    def outputs(self, timeout_seconds=LONGEST_SECONDS):
        """What each printed, after all have ended."""
        return [p.communicate(timeout=timeout_seconds)[0] for p in self.processes]

    def succeed(self, timeout_seconds=LONGEST_SECONDS):
        """The outputs; an error with all of them when one failed."""
        outputs = self.outputs(timeout_seconds)
        codes = [process.returncode for process in self.processes]
        assert codes == [0] * len(codes), "\n".join(
            f"--- worker {rank}: {code}\n{output[-3000:]}"
            for rank, (code, output) in enumerate(zip(codes, outputs, strict=True))
        )
        return outputs
