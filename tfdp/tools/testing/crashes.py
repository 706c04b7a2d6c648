"""Known errors of stock strategies, and their causes."""

from __future__ import annotations

import dataclasses
import re

from tfdp.tools.testing.report import Finding

# Escape codes: Keras prints parts of its messages in bold.
TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")
LONGEST_DESCRIPTION = 400

ADVICE = "Train under tfdp.DataParallelStrategy, where this works."


@dataclasses.dataclass(frozen=True)
class KnownError:
    """A substring of the message, and its cause."""

    piece: str
    cause: str
    why: str
    instead: str = ADVICE


KNOWN = (
    KnownError(
        "merge_call` called while defining a new graph",
        "reduction inside a conditional",
        "Gradient accumulation, EMA overwrite and float16 loss scaling update inside a "
        "conditional, where TensorFlow's strategies cannot reduce.",
    ),
    KnownError(
        "must feed a value for placeholder",
        "steps_per_execution with collectives",
        "TensorFlow creates collective keys inside the function that "
        "steps_per_execution repeats.",
        ADVICE + " Or set steps_per_execution=1.",
    ),
    KnownError(
        "AddN",
        "mean of a batch with unlike parts",
        "Before training Keras reduces the first batch to its mean, which fails if the "
        "replicas' parts differ in length or are strings.",
    ),
    KnownError(
        "object has no attribute 'device'",
        "sparse or ragged input",
        "Before training Keras reduces the first batch to its mean, which TensorFlow "
        "cannot do for sparse and ragged tensors.",
    ),
    KnownError(
        "ConcatV2",
        "variables of several types",
        "TensorFlow packs gradients of all types into one buffer.",
    ),
    KnownError(
        "Collective",
        "collectives of two strategies",
        "TensorFlow's strategies share collective keys: a second one in a process can "
        "collide with the first, and all collectives fail until the process ends.",
        ADVICE + " Or check each strategy in its own process.",
    ),
    KnownError(
        "Mixing different tf.distribute.Strategy",
        "made in another scope",
        "The model, its optimizer or a variable was made under another strategy.",
        "Create everything inside build(): check_parity calls it under the strategy's "
        "scope.",
    ),
)


def describe_error(error: Exception) -> str:
    """Type and message of an error on one line, truncated."""
    text = TERMINAL_CODES.sub("", f"{type(error).__name__}: {error}")
    text = " ".join(text.split())
    is_long = len(text) > LONGEST_DESCRIPTION
    return f"{text[:LONGEST_DESCRIPTION]}..." if is_long else text


def explain_error(error: Exception) -> Finding:
    """The cause of an error in training under a strategy, if known."""
    evidence = f"training raised {type(error).__name__}"
    for known in KNOWN:
        if known.piece in str(error):
            return Finding(known.cause, (), evidence, known.why, known.instead)
    return Finding(
        "training raises",
        (),
        evidence,
        "The model trains on one device, but not under the strategy.",
        "Read the message above; raise_on_failure=True raises an exception with the "
        "error as its cause.",
    )
