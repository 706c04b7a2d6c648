"""The directory of checkpoints: whether all workers can use it, and what lies there."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from tfdp.checkpoint.hosts import Hosts
from tfdp.checkpoint.manifest import read_manifest
from tfdp.data.places import Place
from tfdp.errors import DataError

__all__ = ["refuse_another_view"]


def refuse_another_view(
    directory: Place, found: Sequence[Place], hosts: Hosts, key: str
) -> None:
    """Where worker 0 sees nothing, what others see must not be lost in silence.

    Args:
      directory: of the checkpoints.
      found: the folders of checkpoints that this host sees.
      hosts: who restores.
      key: the same on all hosts, and used once.

    Raises:
      DataError: another host sees one; on all hosts.
    """
    mine = ""
    for folder in found:
        with contextlib.suppress(DataError):
            read_manifest(folder)
            mine = folder.name
            break
    notes = hosts.share_note(f"checkpoints seen {key}", mine)
    for rank, name in sorted(notes.items()):
        if name:
            raise DataError(
                f"Worker {rank} sees the checkpoint {name} in {directory}, and worker "
                "0 sees none there. Give a directory that all hosts see; is it mounted "
                "on worker 0?"
            )
