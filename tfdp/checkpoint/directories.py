"""Checks the checkpoint directory on all workers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from tfdp.checkpoint.hosts import Hosts
from tfdp.checkpoint.manifest import read_manifest
from tfdp.data.places import Place
from tfdp.errors import ConfigurationError, DataError
from tfdp.files.atomic import remove_leftovers, temporary_name

# A network file system may show a new file late.
LONGEST_SIGHT_SECONDS = 5.0
POLL_SECONDS = 0.1
MOST_LISTED = 20


def check_directory(directory: Place, hosts: Hosts) -> None:
    """Refuses a directory that a worker cannot write to, or that is not shared.

    Each worker creates a marker file and looks for worker 0's. Call it on all hosts.

    Raises:
      ConfigurationError: the same on all hosts.
    """
    text = hosts.text_of_chief(f"{temporary_name('mark')}/{directory}")
    mark, _, chief_directory = text.partition("/")
    mine = directory / (mark if hosts.is_chief else temporary_name("mark"))
    try:
        failed = _gathered(hosts, _make(directory, mine))
        if failed:
            raise ConfigurationError(
                f"Checkpoints cannot be written to {failed}. Give a directory that "
                "every worker can create or write to."
            )
        unseen = _gathered(hosts, _look_for(directory, mark))
        if unseen:
            raise ConfigurationError(
                "The workers do not share one checkpoint directory: a file that "
                f"worker 0 wrote to {chief_directory} is missing in {unseen}. "
                "Give a path that is the same directory on all workers, on a shared "
                "file system that each host mounts, or a URL (gs://bucket/run)."
            )
    finally:
        with contextlib.suppress(OSError, DataError):
            mine.unlink(missing_ok=True)


def _gathered(hosts: Hosts, mine: str) -> str:
    """All workers' error texts joined; "" if there are none."""
    texts = hosts.texts(mine, "check of the directory of checkpoints")
    of = " on worker {}" if hosts.count > 1 else ""
    return "; ".join(
        text.replace("\0", of.format(rank), 1)
        for rank, text in enumerate(texts)
        if text
    )


def _make(directory: Place, mark: Place) -> str:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)
        # Empty: a disk that is full now may have room at the first save.
        mark.touch() if isinstance(mark, Path) else mark.write_text("mark")
    except (OSError, ValueError, DataError) as error:
        return f"{directory}\0 ({type(error).__name__}: {str(error)[:300]})"
    return ""


def _look_for(directory: Place, mark: str) -> str:
    why = ""
    deadline = time.monotonic() + LONGEST_SIGHT_SECONDS
    while True:
        try:
            if (directory / mark).is_file():
                return ""
        except (OSError, DataError) as error:
            why = f" ({type(error).__name__}: {str(error)[:300]})"
        if time.monotonic() > deadline:
            return f"{directory}\0{why}"
        time.sleep(POLL_SECONDS)


def refuse_another_view(
    directory: Place, found: Sequence[Place], hosts: Hosts, key: str
) -> None:
    """Raises on all hosts if a host sees a checkpoint where worker 0 sees none.

    `found` are this host's checkpoint folders; `key` is unique.
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
                f"Worker {rank} sees the checkpoint {name} in {directory}, but worker "
                "0 sees none. Give a directory that all hosts see and mount."
            )


def no_checkpoint(directory: Place) -> DataError:
    """The error for a directory without checkpoints; lists what it holds."""
    there = f"which holds {_listed(directory)}"
    if not _is_folder(directory):
        there = "and no such folder"
    parent = directory.parent
    while parent != parent.parent and not _is_folder(parent):
        parent = parent.parent
    return DataError(
        f"There is no checkpoint in {directory}, {there}. {parent} holds "
        f"{_listed(parent)}. Give the directory that the checkpoints were saved to; "
        "if there may be none yet, use restore(model, must_exist=False)."
    )


def _is_folder(place: Place) -> bool:
    try:
        return place.is_dir()
    except (OSError, DataError):
        return False


def _listed(folder: Place) -> str:
    try:
        names = sorted(path.name for path in folder.glob("*"))
    except (OSError, DataError) as error:
        return f"entries that cannot be listed ({type(error).__name__})"
    more = f" and {len(names) - MOST_LISTED} more" if names[MOST_LISTED:] else ""
    return ", ".join(names[:MOST_LISTED]) + more if names else "nothing"
