"""Whether TensorFlow and Keras are those that tfdp was checked with; said once."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping

import keras
import tensorflow as tf

from tfdp._private.names import CHECKED_VERSIONS
from tfdp.errors import UncheckedVersionWarning


@functools.cache
def warn_of_unchecked_versions() -> None:
    """Warns, once in a process, of a TensorFlow or Keras of another minor version.

    tfdp uses names that both keep to themselves and may change from one to the next.
    """
    installed = {"tensorflow": tf.__version__, "keras": keras.__version__}
    for package, checked in CHECKED_VERSIONS.items():
        if installed[package].split(".")[:2] != checked.split(".")[:2]:
            warnings.warn(
                f"tfdp was checked with {package} {checked}, and this is "
                f"{installed[package]}. Results may differ from one device's without "
                f"an error: install {package}=={checked}, or let `tfdp check` compare "
                "your model with one device.",
                UncheckedVersionWarning,
                stacklevel=3,
            )


# `IdleOptions`: options that act between hosts only, where there is one host.


class IdleOptions:
    """What `auto_strategy` was given and left out; a strategy made by name refuses it.

    Args:
      where: "one host" or "a TPU".
      reasons: why each option cannot act there, by name.

    >>> idle = IdleOptions("one host", {"min_hosts": "there are no others"})
    >>> idle.lines
    ('min_hosts has no effect on one host: there are no others',)
    """

    def __init__(self, where: str, reasons: Mapping[str, str]):
        self._where = where
        self._reasons = dict(reasons)

    def add(self, option: str, why: str) -> None:
        """Leaves out one more option, which is no argument of the strategy."""
        self._reasons[option] = why

    @property
    def lines(self) -> tuple[str, ...]:
        """What the first `fit` says of them."""
        return tuple(
            f"{option} has no effect on {self._where}: {why}"
            for option, why in self._reasons.items()
        )
