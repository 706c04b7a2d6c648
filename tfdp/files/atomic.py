"""Files that a reader never meets half written. Pure; no framework is imported.

A file is written under a temporary name, brought to the disk, and renamed. A writer
that dies leaves the temporary file; the next writer to the folder removes it. Dead is
who ran here and runs no more; of one that ran elsewhere nobody here can tell, so what
it left is removed a day after its last change.
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
# Of the name that the file will have, so that the temporary one is not too long.
KEPT_CHARACTERS = 40
SECONDS_TO_DEATH = 24 * 3600

_numbers = itertools.count()


@contextlib.contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name beside `path` to write to; the file takes its place at the end.

    The name ends as `path` does, which tells some writers the format. After an error
    nothing of it is left, and `path` is what it was. At the end the file outlasts a
    power cut. Where `path` is a link, what it leads to is replaced.

    Raises:
      OSError: when it cannot take the place of `path`: there is a device, or a folder.
    """
    target = Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)
    if os.path.lexists(target) and not os.path.isfile(target):
        # Else a device would be gone, for all programs of the machine.
        raise OSError(errno.EINVAL, "it is no file, or a link to itself", str(target))
    with temporary(target) as half_written:
        yield half_written
        sync_file(half_written)
        os.replace(half_written, target)
        sync_folder(target.parent)


@contextlib.contextmanager
def temporary(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name beside `path` that ends as it does; what has it at the end is removed."""
    target = Path(path)
    remove_leftovers(target.parent)
    half_written = target.with_name(temporary_name(target.name))
    try:
        yield half_written
    finally:
        half_written.unlink(missing_ok=True)


def temporary_name(name: str) -> str:
    """Another name for each call, that says who writes and ends as `name` does.

    `os.replace` it, or remove it, when all is written.
    """
    pid = os.getpid()
    start = _start_of(pid) or "0"
    owner = f"{_place()}-{pid}-{start}-{next(_numbers)}"
    return f"{PREFIX}{owner}-{name[-KEPT_CHARACTERS:]}"


def remove_leftovers(folder: Any) -> None:
    """Removes what dead writers have left in a folder.

    Args:
      folder: a `pathlib.Path`, or what has its `glob`, `stat` and `unlink`. Nothing
        happens when it is not there or is somebody else's.
    """
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
    # A store that does not know when says 0.
    return changed > 0 and time.time() - changed > SECONDS_TO_DEATH


@functools.cache
def _place() -> str:
    """Where a process number has a meaning: this boot of this machine's container."""
    facts = [platform.node()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            is_link = os.path.islink(path)
            facts.append(os.readlink(path) if is_link else Path(path).read_text())
    return hashlib.blake2b(" ".join(facts).encode(), digest_size=8).hexdigest()


def _start_of(pid: int) -> str | None:
    """When a process began, in ticks of the clock; None: there is none, or no /proc.

    A process number is used again; with the time it is not.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field, in brackets, may hold spaces and brackets; the 22nd is wanted.
    fields = text.rpartition(")")[2].split()
    # A zombie writes no more.
    return None if fields[0] in "ZX" else fields[19]


def sync_file(path: str | os.PathLike[str]) -> None:
    """Waits until a file is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Waits until a folder's names are on the disk, where it can be asked for that."""
    # Some network file systems, and systems other than Linux, open no folders.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
