"""Temporary folders that disappear even if the process is killed.

Under `tfdp launch` they are created in the launcher's folder, which it removes.
"""

from __future__ import annotations

import contextlib
import os
import tempfile

from tfdp.cluster.progress import FOLDER_VARIABLE


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A new folder, removed with the object or when a `with` block ends."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        with contextlib.suppress(OSError):  # the folder may be gone
            return tempfile.TemporaryDirectory(prefix="tfdp-", dir=folder)
    return tempfile.TemporaryDirectory(prefix="tfdp-")
