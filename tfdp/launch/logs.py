"""What workers write, kept in a file for each: `tfdp launch --log-dir`."""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import BinaryIO

from tfdp.errors import ConfigurationError

__all__ = ["WorkerLogs"]


class WorkerLogs:
    """Files `worker-RANK.log` in a folder; later starts are added at their ends.

    Args:
      folder: where; it is made.

    Raises:
      ConfigurationError: when nothing can be written there.
    """

    def __init__(self, folder: str):
        self._folder = pathlib.Path(folder)
        self._files: dict[int, LogFile] = {}
        #: Takes lines for people.
        self.say: Callable[[Sequence[str]], None] = lambda lines: None
        self._start = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            is_writable = os.access(self._folder, os.W_OK)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"--log-dir {folder!r} cannot be made: {error}. Name another folder."
            ) from error
        if not is_writable:
            raise ConfigurationError(
                f"--log-dir {folder!r} cannot be written to. Name another folder."
            )

    def begin(self) -> None:
        """Another start of all workers."""
        self._start += 1

    def of(self, rank: int) -> LogFile:
        """The file of a worker, with a line that says which start this is."""
        if rank not in self._files:
            path = self._folder / f"worker-{rank}.log"
            self._files[rank] = LogFile(path, lambda lines: self.say(lines))
        file = self._files[rank]
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        file.write(f"--- start {self._start}, {now}\n".encode())
        return file

    def close(self) -> None:
        """Closes all files."""
        for file in self._files.values():
            file.close()


class LogFile:
    """A file to which whole lines are added, as long as there is room for them.

    Args:
      path: of the file.
      say: takes lines for people.
    """

    def __init__(self, path: pathlib.Path, say: Callable[[Sequence[str]], None]):
        self._path, self._say = path, say
        self._file: BinaryIO | None = None
        self._has_told = False

    def write(self, data: bytes) -> None:
        """Adds lines; says once when that fails, for no disk ends a training."""
        try:
            if self._file is None:
                self._file = open(self._path, "ab", buffering=0)
            self._file.write(data)
        except OSError as error:
            if not self._has_told:
                self._has_told = True
                why = error.strerror or str(error)
                lost = f"{self._path} cannot be written ({why}): lines are lost there"
                self._say([f"{lost} until it can; the workers go on"])

    def flush(self) -> None:
        """Nothing: a line is written at once."""

    def close(self) -> None:
        """Writes nothing any more."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
