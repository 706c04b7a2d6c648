"""Checks of the installed versions, and of options without effect."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping

import keras
import tensorflow as tf

from tfdp.errors import UncheckedVersionWarning
from tfdp.seams.table import CHECKED_VERSIONS, check_seams


@functools.cache
def check_versions() -> None:
    """Refuses frameworks with other methods than tfdp replaces; warns, once, of other
    minor versions."""
    check_seams()
    installed = {"tensorflow": tf.__version__, "keras": keras.__version__}
    for package, checked in CHECKED_VERSIONS.items():
        if installed[package].split(".")[:2] != checked.split(".")[:2]:
            warnings.warn(
                f"tfdp was checked with {package} {checked}, and this is "
                f"{installed[package]}. Results may differ from one device's without "
                f"an error: install {package}=={checked}, or compare your model with "
                "one device by `tfdp check`.",
                UncheckedVersionWarning,
                stacklevel=3,
            )


class IdleOptions:
    """Options of `auto_strategy` without effect `where` it runs, with the reasons.

    >>> idle = IdleOptions("one host", {"min_hosts": "there are no others"})
    >>> idle.lines
    ('min_hosts has no effect on one host: there are no others',)
    """

    def __init__(self, where: str, reasons: Mapping[str, str]):
        self._where = where
        self._reasons = dict(reasons)

    def add(self, option: str, why: str) -> None:
        self._reasons[option] = why

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(
            f"{option} has no effect on {self._where}: {why}"
            for option, why in self._reasons.items()
        )
