"""Folders for what is thrown away, whole models among it.

A process that is killed leaves them. Below `tfdp launch` they lie in the launcher's
folder, which it removes.
"""

from __future__ import annotations

import os
import tempfile

from tfdp.cluster.progress import FOLDER_VARIABLE


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A new folder, which goes with the object, or when a `with` block ends.

    Raises:
      OSError: when none can be made, neither for the launcher nor for this machine.

    >>> with scratch_folder() as folder:
    ...     os.path.isdir(folder)
    True
    """
    launchers = os.environ.get(FOLDER_VARIABLE)
    if launchers:
        try:
            return tempfile.TemporaryDirectory(prefix="tfdp-", dir=launchers)
        except OSError:
            pass  # somebody has removed it
    return tempfile.TemporaryDirectory(prefix="tfdp-")
