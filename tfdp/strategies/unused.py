"""Prints, at a `fit` or at the end, that a program does not use its strategy.

A model made outside the scope trains on one device, without an error.
"""

from __future__ import annotations

import atexit
import sys

from tfdp.cluster.helper_process import is_started_by_multiprocessing

_made: list[str] = []
_used: list[bool] = []
_told: list[bool] = []


def note_made(strategy: object, is_chief: bool) -> None:
    """Records that a strategy was created; only the chief prints the message.

    A data loader's process, which imports the script anew, is to train nothing.
    """
    if is_chief and not _made and not _used and not is_started_by_multiprocessing():
        _made.append(repr(strategy))
        atexit.register(_say_if_unused)
        # Loads TensorFlow, which commands that know no strategy start without.
        from tfdp._private.keras_calls import call_before_loops

        call_before_loops(_say_if_unused_by_fit)


def note_used() -> None:
    """Records that a strategy's scope or step was used: no message then."""
    if not _used:
        _used.append(True)


def _say_if_unused_by_fit() -> None:
    """Says so once, before a `fit`, while the program can still be stopped."""
    if _told:
        return
    from tfdp._private.frames import training_input_of_caller
    from tfdp._private.names import is_default_strategy
    from tfdp.strategies.in_words import is_without_fit_message

    fit = training_input_of_caller()
    if fit is None or is_without_fit_message():
        return  # an evaluation may be of one device
    if _used and not is_default_strategy(fit["self"].distribute_strategy):
        return
    _told.append(True)
    print(
        f"tfdp: the model {fit['self'].name!r} trains on one device, not under "
        f"{_made[0]}: it was made, or loaded, outside of the strategy's scope. To "
        "train it on the replicas, move these two lines:\n"
        "    with strategy.scope():\n"
        "        model = ...  # also keras.models.load_model(...)\n"
        "        model.compile(...)"
        + ("\nA model that is to train alone needs no change." if _used else ""),
        file=sys.stderr,
        flush=True,
    )


def _say_if_unused() -> None:
    # Loads TensorFlow, which commands that know no strategy start without.
    from tfdp._private.keras_calls import has_counted

    # A program that ended before it trained, with an error, or in an interactive
    # session needs no message.
    if (
        _used
        or _told
        or not has_counted()
        or hasattr(sys, "last_type")
        or hasattr(sys, "ps1")
    ):
        return
    print(
        f"tfdp: {_made[0]} was made and never used, so nothing was trained on its "
        "replicas. Make and compile the model within `with strategy.scope():`.",
        file=sys.stderr,
    )
