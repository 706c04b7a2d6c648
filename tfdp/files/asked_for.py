"""Output files named by command options: bad paths are reported in one line. Pure.

Before the work where possible, and after it if the disk is full.
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

MOST_LINKS = 40  # the limit of symbolic links that Linux follows


def check_output_paths(places: Mapping[str, str | None]) -> None:
    """Checks each option's path (`check_output_path`); also rejects a shared path."""
    taken: dict[str, str] = {}
    for option, path in places.items():
        check_output_path(option, path)
        if path is None:
            continue
        other = taken.setdefault(os.path.realpath(path), option)
        if other != option:
            raise ConfigurationError(
                f"{option} {path}: {other} writes to the same file. Give each its own."
            )


def check_output_path(option: str, path: str | None) -> None:
    """A `ConfigurationError` naming `option`, before the work, for a bad `path`."""
    if path is None:
        return
    # Not the methods of Path, which raise OSError for too long a name.
    if not os.path.isdir(Path(path).absolute().parent):
        raise ConfigurationError(f"{option} {path}: there is no such folder")
    there = ""
    if os.path.isdir(path or "."):
        there = "a folder"
    elif os.path.exists(path) and not os.path.isfile(path) or _is_stream(path):
        there = "a device or a pipe"  # which the file would replace
    elif os.path.islink(path) and os.path.islink(os.path.realpath(path)):
        there = "a link to itself"
    if there:
        raise ConfigurationError(
            f"{option} {path or repr(path)}: that is {there}. Give the path of a file, "
            "which is made or replaced."
        )


def _is_stream(path: str) -> bool:
    """Whether this is a file descriptor of a process, such as /dev/stdout."""
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
    """Turns an OSError while writing `path` into a `ConfigurationError`."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"{option} {path} cannot be written ({error.strerror or error}). Give "
            f"another place: {option} PATH."
        ) from error


def write_text_for(option: str, path: str | os.PathLike[str], text: str) -> None:
    """Writes `text` to the `path` of `option`; what UTF-8 cannot encode becomes "?"."""
    with written_for(option, path), replaced(path) as half_written:
        half_written.write_text(text, "utf-8", errors="replace")


def write_json_for(option: str, path: str | os.PathLike[str], value: Any) -> None:
    """Writes `value` as JSON; errors as `written_for`."""
    with written_for(option, path):
        write_json(path, value)
