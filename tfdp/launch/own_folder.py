"""The launcher's folder on this machine, for what workers leave: one for each start.

Nothing in it is needed for a start. Where the disk is full, or somebody has removed the
folder, the launcher learns less of its workers and goes on.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from types import TracebackType

from tfdp.launch.guard import FOLDER_PREFIX

PRIVATE = 0o700


class OwnFolder:
    """A folder in the temporary folder, which goes at the end.

    Attributes:
      path: of the folder. By it strays are known, also where it cannot be made.
    """

    def __init__(self) -> None:
        try:
            self.path = tempfile.mkdtemp(prefix=FOLDER_PREFIX)
        except OSError:  # no temporary folder can be written to now
            self.path = f"/tmp/{FOLDER_PREFIX}{secrets.token_hex(8)}"
        self._starts = 0

    def begin_start(self, say: Callable[[Sequence[str]], None]) -> str:
        """The path of a folder for another start: the numbers of processes come again.

        What the start before has left is removed.

        Args:
          say: is given lines for people, where the folder cannot be made.
        """
        shutil.rmtree(self._of_start(), ignore_errors=True)
        self._starts += 1
        folder = self._of_start()
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, PRIVATE)
            os.mkdir(folder, PRIVATE)
        except OSError as error:
            why = error.strerror or str(error)
            say(
                [
                    f"{folder} cannot be made ({why}): this start goes on without what "
                    "its workers would leave there, their steps and what they die of"
                ]
            )
        return folder

    def _of_start(self) -> str:
        return os.path.join(self.path, str(self._starts))

    def __enter__(self) -> OwnFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
