"""Atomic file replacement. Pure; no framework is imported.

A file is written under a temporary name, synced, and renamed. A writer that dies leaves
the temporary file, which the next writer to the folder removes: at once if the process
ran on this machine, otherwise a day after its last change.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import itertools
import os
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PREFIX = ".writing-"
TEMPORARY = re.compile(
    rf"{re.escape(PREFIX)}(?P<place>[0-9a-f]{{16}})-(?P<pid>\d{{1,10}})-"
    r"(?P<start>\d{1,20})-(?P<number>\d{1,20})-.*"
)
KEPT_CHARACTERS = 40  # of the final name, to keep the temporary one short
SECONDS_TO_DEATH = 24 * 3600

_numbers = itertools.count()


@contextlib.contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path to write to, in the folder of `path`, which it then replaces.

    It keeps the suffix, by which some writers choose the format. On an error it is
    removed; else the file survives a power cut. Replaces a link's target.
    """
    target = Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)
    if os.path.lexists(target) and not os.path.isfile(target):
        # Replacing a device would remove it for the whole machine.
        raise OSError(errno.EINVAL, "it is no file, or a link to itself", str(target))
    with temporary(target) as half_written:
        yield half_written
        sync_file(half_written)
        os.replace(half_written, target)
        sync_folder(target.parent)


@contextlib.contextmanager
def temporary(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path in the folder of `path`, removed at the end."""
    target = Path(path)
    remove_leftovers(target.parent)
    half_written = target.with_name(temporary_name(target.name))
    try:
        yield half_written
    finally:
        half_written.unlink(missing_ok=True)


def temporary_name(name: str) -> str:
    """A unique name that encodes the writing process; `name`'s suffix is kept."""
    pid = os.getpid()
    start = _start_of(pid) or "0"
    owner = f"{_place()}-{pid}-{start}-{next(_numbers)}"
    return f"{PREFIX}{owner}-{name[-KEPT_CHARACTERS:]}"


def remove_leftovers(folder: Any) -> None:
    """Removes dead writers' temporary files in a folder, a `Path` or `RemotePath`."""
    with contextlib.suppress(OSError):
        for path in list(folder.glob(f"{PREFIX}*")):
            # Two writers may remove the same one.
            with contextlib.suppress(OSError):
                if _is_leftover(path):
                    path.unlink()


def _is_leftover(path: Any) -> bool:
    match = TEMPORARY.fullmatch(path.name)
    if match is None:
        return False
    if match["place"] == _place() and match["start"] != "0":
        return _start_of(int(match["pid"])) != match["start"]
    changed = path.stat().st_mtime
    # Stores without times report 0.
    return changed > 0 and time.time() - changed > SECONDS_TO_DEATH


@functools.cache
def _place() -> str:
    """The scope of process ids: this boot of this machine's container."""
    facts = [platform.node()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            is_link = os.path.islink(path)
            facts.append(os.readlink(path) if is_link else Path(path).read_text())
    return hashlib.blake2b(" ".join(facts).encode(), digest_size=8).hexdigest()


def _start_of(pid: int) -> str | None:
    """Start time of a process in clock ticks, as ids are reused; None: unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field, in parentheses, may hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    # A zombie no longer writes.
    return None if fields[0] in "ZX" else fields[19]


def sync_file(path: str | os.PathLike[str]) -> None:
    """Waits until a file is on disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Waits until a folder's entries are on disk, where the system supports that."""
    # Some network file systems and non-Linux systems cannot open folders.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
