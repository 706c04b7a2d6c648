"""Whether TensorFlow and Keras are those that tfdp was checked with; said once."""

from __future__ import annotations

import functools
import warnings

import keras
import tensorflow as tf

from tfdp._private.names import CHECKED_VERSIONS
from tfdp.errors import UncheckedVersionWarning

__all__ = ["warn_of_unchecked_versions"]


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
