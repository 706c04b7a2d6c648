"""The table of seams: which method of Keras or TensorFlow is replaced, when, and why.

tfdp is exact because it changes what these methods do in its replicas. So a Keras or a
TensorFlow with other signatures is refused: it would train on, with wrong numbers.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
from typing import Any

import keras
import tensorflow as tf

from tfdp.errors import SeamError

# The versions whose signatures are in the table.
CHECKED_VERSIONS = {"tensorflow": "2.21.0", "keras": "3.15.1"}
UNCHECKED = "TFDP_UNCHECKED"


@dataclasses.dataclass(frozen=True)
class Seam:
    """One method that tfdp replaces, or that a replacement calls.

    Args:
      owner: "module" or "module:Class" that defines it.
      attribute: its name.
      signature: its parameters as Python prints them, without annotations; None for an
        attribute that is no function.
      when: "always" (once per process; the replacement calls the original outside of
        tfdp's replicas), "step" (on instances, while replicas are traced), "loop" (on
        instances, during a loop of `fit`, `evaluate` or `predict`), "object" (on one
        instance for as long as it lives), or "context" (within a `with` of tfdp's).
        "called": it stays Keras', and a replacement calls it.
      why: what the replacement adds.
    """

    owner: str
    attribute: str
    signature: str | None
    when: str
    why: str


LOSS = "keras.src.losses.loss"

SEAMS: tuple[Seam, ...] = (
    # Losses (`tfdp.seams.losses`).
    Seam(
        LOSS,
        "reduce_weighted_values",
        "(values, sample_weight=None, mask=None, reduction='sum_over_batch_size', "
        "dtype=None)",
        "always",
        "a replica's loss is divided by the denominator of the whole batch",
    ),
    Seam(
        LOSS,
        "reduce_values",
        "(values, sample_weight=None, reduction='sum_over_batch_size')",
        "always",
        "a replica's mean that was taken elsewhere is refused",
    ),
    Seam(
        LOSS,
        "scale_loss_for_distribution",
        "(value)",
        "always",
        "a replica's penalties are scaled to its share of the rows",
    ),
    Seam(
        LOSS,
        "unscale_loss_for_distribution",
        "(value)",
        "always",
        "a report takes the exact factor of a replica's share back",
    ),
    Seam(LOSS, "standardize_reduction", "(reduction)", "called", ""),
    Seam(LOSS, "apply_mask", "(sample_weight, mask, dtype, reduction)", "called", ""),
    Seam(
        LOSS,
        "squeeze_or_expand_to_same_rank",
        "(x1, x2, expand_rank_1=True)",
        "called",
        "",
    ),
)


def owner_of(seam: Seam) -> Any:
    """The module or class that defines the method."""
    module, _, name = seam.owner.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def moved_seams(seams: tuple[Seam, ...] = SEAMS) -> list[str]:
    """The seams that differ from the table, each with what is there instead."""
    found = []
    for seam in seams:
        try:
            method = getattr(owner_of(seam), seam.attribute)
        except (ImportError, AttributeError):
            found.append(f"{seam.owner} has no {seam.attribute}")
            continue
        if seam.signature is None:
            continue
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
    moved = moved_seams()
    if moved:
        checked = " ".join(f"{name}=={v}" for name, v in CHECKED_VERSIONS.items())
        raise SeamError(
            "tfdp replaces methods of Keras and TensorFlow to make training exact, and "
            f"Keras {keras.__version__} with TensorFlow {tf.__version__} has others: "
            f"{'; '.join(moved)}. Install versions that tfdp was checked with, "
            f"{checked}. {UNCHECKED}=1 in the environment trains anyway, and results "
            "may be wrong without an error."
        )


def _parameters(signature: inspect.Signature) -> str:
    """The parameters as text, without annotations."""
    bare = [
        one.replace(annotation=inspect.Parameter.empty)
        for one in signature.parameters.values()
    ]
    return str(inspect.Signature(bare))
