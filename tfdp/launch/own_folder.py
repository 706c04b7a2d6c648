"""The launcher's temporary folder for files of the workers, one subfolder per start.

It is optional: on a full disk, or if the folder was removed, the launcher goes on with
less information about its workers.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence

from tfdp.launch.guard import FOLDER_PREFIX

PRIVATE = 0o700


class OwnFolder:
    """A temporary folder; its `path` identifies strays even if it cannot be made."""

    def __init__(self) -> None:
        try:
            self.path = tempfile.mkdtemp(prefix=FOLDER_PREFIX)
        except OSError:  # no writable temporary folder
            self.path = f"/tmp/{FOLDER_PREFIX}{secrets.token_hex(8)}"
        self._starts = 0

    def begin_start(self, say: Callable[[Sequence[str]], None]) -> str:
        """A new folder, as process ids are reused; removes the previous one."""
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
                    "its workers' progress and crash reports"
                ]
            )
        return folder

    def _of_start(self) -> str:
        return os.path.join(self.path, str(self._starts))

    def __enter__(self) -> OwnFolder:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
