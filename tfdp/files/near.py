"""The existing path that a misspelt path most likely means. Pure."""

from __future__ import annotations

import os
from collections.abc import Callable

from tfdp.checks import nearest

# Of a larger folder only these many entries are compared.
MOST_ENTRIES = 10_000


def did_you_mean_path(path: str, is_one: Callable[[str], bool]) -> str:
    """The end of an error about a path that does not exist; begins with a space.

    Each part of the path that does not exist is compared with what is there.

    Args:
      path: what was given.
      is_one: whether an existing path is of the right kind, such as `os.path.isdir`.
    """
    try:
        close = _near(path, is_one)
    except (OSError, ValueError):
        close = None  # a folder that cannot be read, a name that no file can have
    return "" if close is None else f" Did you mean {close}?"


def _near(path: str, is_one: Callable[[str], bool]) -> str | None:
    folder, name = os.path.split(path.rstrip(os.sep))
    other = None  # the folder that a misspelt one means
    if folder and not os.path.isdir(folder):
        other = _near(folder, os.path.isdir)
        if other is None or is_one(os.path.join(other, name)):
            return other and os.path.join(other, name)
        folder = other
    names = os.listdir(folder or ".")[:MOST_ENTRIES]
    close = nearest(name, (n for n in names if is_one(os.path.join(folder, n))))
    return other if close is None else os.path.join(folder, close)


def is_script(path: str) -> bool:
    """Whether this is a Python file.

    >>> is_script("no/such/folder/train.py")
    False
    """
    return path.endswith(".py") and os.path.isfile(path)
