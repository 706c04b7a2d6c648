"""Files that an option of a command asks for: a bad place is said in one line. Pure.

Before the work where that can be seen, and after it where the disk is full.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tfdp.errors import ConfigurationError
from tfdp.files.atomic import replaced
from tfdp.files.checked_json import write_json

# One after the other; the system follows no more either.
MOST_LINKS = 40


def refuse_bad_places(places: Mapping[str, str | None]) -> None:
    """As `refuse_bad_place`, of each option and its path; no two may be one file.

    Raises:
      ConfigurationError: a place is bad, or one file would take another's.
    """
    taken: dict[str, str] = {}
    for option, path in places.items():
        refuse_bad_place(option, path)
        if path is None:
            continue
        other = taken.setdefault(os.path.realpath(path), option)
        if other != option:
            raise ConfigurationError(
                f"{option} {path}: {other} writes to the same file. Give each its own."
            )


def refuse_bad_place(option: str, path: str | None) -> None:
    """Before the work whose result is to be written to `path`, and not after it.

    Raises:
      ConfigurationError: the folder is missing, or what is there is no file; naming the
        `option` that gave the path.
    """
    if path is None:
        return
    # Not the methods of Path, which raise an OSError for a name that is too long.
    if not os.path.isdir(Path(path).absolute().parent):
        raise ConfigurationError(f"{option} {path}: there is no such folder")
    there = ""
    if os.path.isdir(path or "."):
        there = "a folder"
    elif os.path.exists(path) and not os.path.isfile(path) or _is_stream(path):
        there = "a device or a pipe"  # whose place the file would take
    elif os.path.islink(path) and os.path.islink(os.path.realpath(path)):
        there = "a link to itself"
    if there:
        raise ConfigurationError(
            f"{option} {path or repr(path)}: that is {there}. Give the path of a file, "
            "which is made or replaced."
        )


def _is_stream(path: str) -> bool:
    """Whether this is what a process has open already, such as /dev/stdout."""
    target = os.path.abspath(path)
    for _ in range(MOST_LINKS):
        if target.startswith(("/dev/fd/", "/proc/")):
            return True
        if not os.path.islink(target):
            break
        link = os.path.join(os.path.dirname(target), os.readlink(target))
        target = os.path.normpath(link)
    return False


@contextlib.contextmanager
def written_for(option: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """What fails while `path` is written is said in one line, with what to do.

    Raises:
      ConfigurationError: in the place of an OSError; naming the `option` that gave, or
        can give, the path.
    """
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"{option} {path} cannot be written ({error.strerror or error}). Give "
            f"another place: {option} PATH."
        ) from error


def write_text_for(option: str, path: str | os.PathLike[str], text: str) -> None:
    """Writes `text`, a page or a table, to the `path` that `option` has given.

    What UTF-8 cannot hold, such as half a character in a file's name, becomes "?".

    Raises:
      ConfigurationError: it cannot be written.
    """
    with written_for(option, path), replaced(path) as half_written:
        half_written.write_text(text, "utf-8", errors="replace")


def write_json_for(option: str, path: str | os.PathLike[str], value: Any) -> None:
    """Writes `value` as JSON; see `write_text_for`."""
    with written_for(option, path):
        write_json(path, value)
