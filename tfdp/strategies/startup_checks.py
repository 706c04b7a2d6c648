"""Checks of the installed versions."""

from __future__ import annotations

import functools
import warnings

import keras
import tensorflow as tf

from tfdp.errors import UncheckedVersionWarning
from tfdp.seams.losses import replace_loss_functions
from tfdp.seams.table import CHECKED_VERSIONS, check_seams, is_of_keras_3_16
from tfdp.tracing.statements import register_results


def check_versions() -> None:
    """Refuses frameworks with other methods than tfdp replaces, replaces the functions
    that are replaced for good, and warns, once, of other minor versions."""
    check_seams()
    replace_loss_functions()
    register_results()
    if is_of_keras_3_16():
        from tfdp._private.newer_keras import mend_newer_keras

        mend_newer_keras()
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
