"""`RunFile`: a worker's file of a run, to which a training adds lines."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tfdp.errors import ConfigurationError
from tfdp.tools.runs.entries import Entry, content_from
from tfdp.tools.runs.lines import line_of


def name_of_file(worker: int) -> str:
    """Of the file of a worker in the run's directory.

    >>> name_of_file(3)
    'worker-3.jsonl'
    """
    return f"worker-{worker}.jsonl"


class RunFile:
    """A file that grows by one line at a time.

    A line is with the system when `add` returns, so what a killed process has added is
    there; a power cut may take the last seconds of it.

    Args:
      directory: of the run; made where it is missing.
      worker: whose file.

    Raises:
      ConfigurationError: it cannot be made or written to.
    """

    def __init__(self, directory: str | os.PathLike[str], worker: int):
        self.path = Path(directory, name_of_file(worker))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Nothing there can make the training wait.
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
            self._descriptor: int | None = os.open(self.path, flags, 0o644)
            self._end_torn_line(self._descriptor)
        except OSError as error:
            raise ConfigurationError(
                f"The run cannot be recorded in {self.path}: {error.strerror}. Give a "
                "directory that this process may write to."
            ) from error

    @staticmethod
    def _end_torn_line(descriptor: int) -> None:
        """Whoever wrote before may have been killed in the middle of a line."""
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")

    def add(self, entry: Entry) -> None:
        """Adds a line.

        Raises:
          OSError: the disk is full, say.

        Cost: one system call; some 20 microseconds.
        """
        if self._descriptor is None:
            return
        line = line_of(content_from(entry))
        written = os.write(self._descriptor, line)
        if written < len(line):
            raise OSError(0, "there is no more room")

    def close(self) -> None:
        """Adds no more."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


# How many steps share a line: few lines for long runs, and none is ever rewritten.


#: Lines of each width; a run of a million steps has ten thousand.
LINES = 1000


def steps_of_line(made: int) -> int:
    """How many steps the next line holds: 1, after 1,000 lines 2, then 4 ...

    It goes by the number of steps alone, so the lines of all workers are of the same
    steps. A run of n steps has about 1000 log2(n / 1000) lines.

    Args:
      made: steps before it.

    >>> [steps_of_line(made) for made in (0, 999, 1000, 2999, 3000, 10**6)]
    [1, 1, 2, 2, 4, 512]
    """
    return 1 << ((made // LINES + 1).bit_length() - 1)
