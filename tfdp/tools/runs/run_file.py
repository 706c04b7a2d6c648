"""`RunFile`: a worker's file of a run, to which training appends lines."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tfdp.errors import ConfigurationError
from tfdp.tools.runs.entries import Entry, content_from
from tfdp.tools.runs.lines import line_of


def name_of_file(worker: int) -> str:
    """The name of a worker's file in the run's directory."""
    return f"worker-{worker}.jsonl"


class RunFile:
    """Appends one line at a time to a worker's file; creates the directory.

    `add` hands the line to the kernel, so it survives a killed process; a power cut may
    lose the last seconds. Raises ConfigurationError if the file cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str], worker: int):
        self.path = Path(directory, name_of_file(worker))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # O_NONBLOCK: a pipe in its place cannot block the training.
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
            self._descriptor: int | None = os.open(self.path, flags, 0o644)
            # Ends the line within which a previous process was killed.
            size = os.fstat(self._descriptor).st_size
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                os.write(self._descriptor, b"\n")
        except OSError as error:
            raise ConfigurationError(
                f"The run cannot be recorded in {self.path}: {error.strerror}. Give a "
                "directory that this process may write to."
            ) from error

    def add(self, entry: Entry) -> None:
        """Appends a line in some 20 microseconds; raises OSError on a full disk."""
        if self._descriptor is None:
            return
        line = line_of(content_from(entry))
        written = os.write(self._descriptor, line)
        if written < len(line):
            raise OSError(0, "there is no more room")

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


#: Lines of each width; a run of a million steps has ten thousand.
LINES = 1000


def steps_of_line(made: int) -> int:
    """Steps in the next line: 1, after 1,000 lines 2, then 4, and so on.

    Depends only on the steps before it, so the lines of all workers cover the same
    steps. A run of n steps has about 1000 log2(n / 1000) lines.

    >>> [steps_of_line(made) for made in (0, 999, 1000, 2999, 3000, 10**6)]
    [1, 1, 2, 2, 4, 512]
    """
    return 1 << ((made // LINES + 1).bit_length() - 1)
