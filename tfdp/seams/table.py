"""The table of seams: which method of Keras or TensorFlow is replaced, when, and why.

tfdp is exact because it changes what these methods do in its replicas. So a Keras or a
TensorFlow with other signatures is refused: it would train on, with wrong numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import os
from types import CodeType
from typing import Any

import keras
import tensorflow as tf

from tfdp.errors import SeamError

# The versions whose signatures are in the table.
CHECKED_VERSIONS = {"tensorflow": "2.21.0", "keras": "3.15.1"}
UNCHECKED = "TFDP_UNCHECKED"


@dataclasses.dataclass(frozen=True)
class Seam:
    """One method that tfdp replaces.

    Args:
      owner: "module" or "module:Class" that defines it.
      attribute: its name.
      signature: its parameters as Python prints them, without annotations; None for an
        attribute that is no function.
      when: "always" (once per process; the replacement calls the original outside of
        tfdp's replicas), "step" (on instances, while replicas are traced), "loop" (on
        instances, during a loop of `fit`, `evaluate` or `predict`), "object" (on one
        instance for as long as it lives), or "context" (within a `with` of tfdp's).
      why: what the replacement adds.
    """

    owner: str
    attribute: str
    signature: str | None
    when: str
    why: str


@dataclasses.dataclass(frozen=True)
class Look:
    """Local variables of a function of Keras that tfdp reads from the call stack.

    Args:
      owner: "module" or "module:Class" that defines the function.
      function: its name.
      names: the local variables, or functions defined in it.
      why: what Keras offers no other way to.
    """

    owner: str
    function: str
    names: tuple[str, ...]
    why: str


KERAS_TRAINER = "keras.src.backend.tensorflow.trainer"
TRAINER = f"{KERAS_TRAINER}:TensorFlowTrainer"

LOOKS: tuple[Look, ...] = (
    Look(
        TRAINER,
        "fit",
        ("self", "callbacks", "epoch_iterator", "initial_epoch", "val_x")
        + ("epoch", "epochs"),
        "callbacks get neither the input of their fit nor each other",
    ),
    Look(
        TRAINER,
        "evaluate",
        ("self", "callbacks"),
        "on several hosts its callbacks must not write on each of them",
    ),
    Look(TRAINER, "predict", ("self",), "a predict in a fit is no loop of that fit"),
    Look(
        TRAINER,
        "_make_function",
        ("one_step_on_data",),
        "Keras averages what strategy.run returns to this function over the replicas",
    ),
    Look(
        TRAINER,
        "make_predict_function",
        ("one_step_on_data_distributed",),
        "Keras joins what strategy.run returns to this function",
    ),
)

LOSS = "keras.src.losses.loss"
METRICS = "keras.src.metrics.reduction_metrics"
VARIABLE = "keras.src.backend.common.variables:Variable"

SEAMS: tuple[Seam, ...] = (
    Seam(
        LOSS,
        "reduce_weighted_values",
        "(values, sample_weight=None, mask=None, reduction='sum_over_batch_size', "
        "dtype=None)",
        "always",
        "a replica's loss is divided by the denominator of the whole batch",
    ),
    # What Keras does to variables, metrics, models and loops.
    Seam(
        VARIABLE,
        "assign_add",
        "(self, value)",
        "always",
        "notes the value that is added: Keras assigns the sum",
    ),
    Seam(
        VARIABLE,
        "assign_sub",
        "(self, value)",
        "always",
        "as for assign_add",
    ),
    Seam(
        "keras.src.backend.tensorflow.core:Variable",
        "_initialize",
        "(self, value)",
        "always",
        "notes the Keras variable whose TensorFlow variable is created",
    ),
    Seam(
        f"{METRICS}:Mean",
        "update_state",
        "(self, values, sample_weight=None)",
        "always",
        "a number of all rows of a replica counts by the replica's rows",
    ),
    Seam(
        f"{METRICS}:MeanMetricWrapper",
        "update_state",
        "(self, y_true, y_pred, sample_weight=None)",
        "always",
        "a number that a program's own function returns is checked first",
    ),
    Seam(
        TRAINER,
        "_maybe_symbolic_build",
        "(self, iterator=None, data_batch=None)",
        "always",
        "notes the model that is built: Keras reads a batch only for its shapes",
    ),
    Seam(
        "keras.src.trainers.trainer:Trainer",
        "_symbolic_build",
        "(self, iterator=None, data_batch=None)",
        "always",
        "a model in replicas is built from a plain batch, no PaddedBatch",
    ),
    Seam(
        f"{KERAS_TRAINER}:TFEpochIterator",
        "__init__",
        "(self, distribute_strategy=None, *args, **kwargs)",
        "always",
        "notes the loop whose input is distributed",
    ),
)


def owner_of(row: Seam | Look) -> Any:
    """The module or class that defines the method."""
    module, _, name = row.owner.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def names_in(code: CodeType) -> set[str]:
    """The local variables of a function, those of functions in it included."""
    return {*code.co_varnames, *code.co_cellvars, *code.co_freevars}


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


@functools.cache
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


def checked_versions() -> str:
    """The installed versions and those to install, for errors."""
    checked = " ".join(f"{name}=={v}" for name, v in CHECKED_VERSIONS.items())
    return (
        f"Installed are Keras {keras.__version__} and TensorFlow {tf.__version__}: "
        f"install versions that tfdp was checked with, {checked}."
    )


def _parameters(signature: inspect.Signature) -> str:
    """The parameters as text, without annotations."""
    bare = [
        one.replace(annotation=inspect.Parameter.empty)
        for one in signature.parameters.values()
    ]
    return str(inspect.Signature(bare))
