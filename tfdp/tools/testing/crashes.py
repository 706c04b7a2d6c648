"""Errors that stock strategies are known to raise, and what stands behind each."""

from __future__ import annotations

import dataclasses
import re

from tfdp.tools.testing.report import Finding

# Keras prints parts of its messages in bold.
TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")
LONGEST_DESCRIPTION = 400

ADVICE = "Train under tfdp.DataParallelStrategy, where this works."


@dataclasses.dataclass(frozen=True)
class KnownError:
    """A piece of the message, and what it means."""

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
        "TensorFlow makes the keys of its collectives inside the function that "
        "steps_per_execution repeats.",
        ADVICE + " Or set steps_per_execution=1.",
    ),
    KnownError(
        "AddN",
        "mean of a batch with unlike parts",
        "Before training Keras asks the strategy for the mean of the first batch, "
        "which does not exist when the replicas' parts differ in length, or hold text.",
    ),
    KnownError(
        "object has no attribute 'device'",
        "sparse or ragged input",
        "Before training Keras asks the strategy for the mean of the first batch, "
        "which TensorFlow cannot take of sparse and ragged tensors.",
    ),
    KnownError(
        "ConcatV2",
        "variables of several types",
        "TensorFlow packs gradients of all types into one buffer.",
    ),
    KnownError(
        "Collective",
        "collectives of two strategies",
        "Strategies of TensorFlow share their keys: a second one in the same process "
        "can meet the collectives of the first, and all fail until the process ends.",
        ADVICE + " Or check each strategy in a process of its own.",
    ),
    KnownError(
        "Mixing different tf.distribute.Strategy",
        "made in another scope",
        "The model, its optimizer or a variable was made under another strategy.",
        "Make everything inside build(), nothing outside of it: check_parity calls it "
        "under the scope of the strategy.",
    ),
)


def describe_error(error: Exception) -> str:
    """Type and message of an error on one line, cut where it gets long."""
    words = TERMINAL_CODES.sub("", f"{type(error).__name__}: {error}").split()
    text = " ".join(words)
    if len(text) > LONGEST_DESCRIPTION:
        text = f"{text[:LONGEST_DESCRIPTION]}..."
    return text


def explain_error(error: Exception) -> Finding:
    """What is known of an error that training under a strategy raised."""
    message = str(error)
    for known in KNOWN:
        if known.piece in message:
            return Finding(
                known.cause,
                (),
                f"training raised {type(error).__name__}",
                known.why,
                known.instead,
            )
    return Finding(
        "training raises",
        (),
        f"training raised {type(error).__name__}",
        "The model trains on one device, and not under the strategy.",
        "Read the message above; the error itself is the cause of the exception that "
        "raise_on_failure=True raises.",
    )
