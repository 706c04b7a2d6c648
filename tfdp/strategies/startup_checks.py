"""Checks of the installed versions."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from typing import Any

import keras
import tensorflow as tf

from tfdp.errors import SeamError, UncheckedVersionWarning
from tfdp.seams.losses import replace_loss_functions
from tfdp.seams.table import (
    CHECKED_VERSIONS,
    DATA,
    LOOKS,
    SEAMS,
    UNCHECKED,
    Look,
    Seam,
    checked_versions,
    is_of_keras_3_16,
    names_in,
    owner_of,
)
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


def moved_looks(looks: tuple[Look, ...] = LOOKS) -> list[str]:
    """The functions that lack a local variable of the table, with what is missing."""
    found = []
    for look in looks:
        try:
            function = inspect.unwrap(getattr(owner_of(look), look.function))
        except (ImportError, AttributeError):
            found.append(f"{look.owner} has no {look.function}")
            continue
        missing = {*look.names} - names_in(function.__code__)
        found += [
            f"{look.function} of {look.owner} has no local variable {name}"
            for name in sorted(missing)
        ]
    return found


def moved_seams(seams: tuple[Seam, ...] = SEAMS) -> list[str]:
    """The seams that differ from the table, each with what is there instead."""
    found = []
    for seam in seams:
        try:
            owner: Any = owner_of(seam)
            method = owner if seam.signature == DATA else getattr(owner, seam.attribute)
        except (ImportError, AttributeError):
            found.append(f"{seam.owner} has no {seam.attribute}")
            continue
        if seam.signature in (None, DATA):
            continue  # data is found missing where it is replaced
        there = _parameters(inspect.signature(method))
        if there != seam.signature:
            found.append(
                f"{seam.owner} has {seam.attribute}{there} instead of {seam.signature}"
            )
    return found


def check_seams() -> None:
    """Raises SeamError if a method in the table has moved or takes other arguments.

    Not with the environment variable TFDP_UNCHECKED=1.
    """
    if os.environ.get(UNCHECKED) == "1":
        return
    moved = [*moved_seams(), *moved_looks()]
    if moved:
        raise SeamError(
            "tfdp replaces methods of Keras and TensorFlow to make training exact, and "
            f"this Keras or TensorFlow has others: {'; '.join(moved)}. "
            f"{checked_versions()} {UNCHECKED}=1 in the environment trains anyway, and "
            "results may be wrong without an error."
        )


def _parameters(signature: inspect.Signature) -> str:
    """The parameters as text, without annotations."""
    bare = [
        one.replace(annotation=inspect.Parameter.empty)
        for one in signature.parameters.values()
    ]
    return str(inspect.Signature(bare))
