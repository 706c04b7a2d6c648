"""What workers write, kept in a file for each: `tfdp launch --log-dir`."""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
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
        self._files: dict[int, BinaryIO] = {}
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

    def of(self, rank: int) -> BinaryIO:
        """The file of a worker, with a line that says which start this is."""
        if rank not in self._files:
            path = self._folder / f"worker-{rank}.log"
            self._files[rank] = path.open("ab")
        file = self._files[rank]
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        file.write(f"--- start {self._start}, {now}\n".encode())
        return file

    def close(self) -> None:
        """Closes all files."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
