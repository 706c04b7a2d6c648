"""Checks of the installed versions, and of options without effect."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping

import keras
import tensorflow as tf

from tfdp.errors import UncheckedVersionWarning
from tfdp.seams.losses import replace_loss_functions
from tfdp.seams.table import CHECKED_VERSIONS, check_seams
from tfdp.tracing.statements import register_results


def check_versions() -> None:
    """Refuses frameworks with other methods than tfdp replaces, replaces the functions
    that are replaced for good, and warns, once, of other minor versions."""
    check_seams()
    replace_loss_functions()
    register_results()
    warn_of_other_versions()


@functools.cache
def warn_of_other_versions() -> None:
    """Warns, once, of minor versions that tfdp was not checked with."""
    installed = {"tensorflow": tf.__version__, "keras": keras.__version__}
    for package, checked in CHECKED_VERSIONS.items():
        if installed[package].split(".")[:2] != checked.split(".")[:2]:
            warnings.warn(
                f"tfdp was checked with {package} {checked}, and this is "
                f"{installed[package]}. Results may differ from one device's without "
                f"an error: install {package}=={checked}, or compare your model with "
                "one device by `tfdp check`.",
                UncheckedVersionWarning,
                stacklevel=4,
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
