"""Calls local training where a loop of Keras' begins and ends."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from tfdp._private.frames import loop_around
from tfdp.seams.replace import replace_for_good
from tfdp.seams.table import EPOCH_ITERATOR
from tfdp.step.local_training import LocalTraining

# In the order in which they were made: the same on all hosts.
_all: list[weakref.ref[LocalTraining]] = []


def call_at_loops(training: LocalTraining) -> None:
    """Registers `training`: loops call its `begin_epoch`, `end_epoch`, `make_equal`."""
    _all.append(weakref.ref(training))
    replace_for_good(EPOCH_ITERATOR, "catch_stop_iteration", _at_ends_of_loops)


def _at_ends_of_loops(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras' `catch_stop_iteration`, which surrounds the steps of each loop."""

    @functools.wraps(original)
    @contextlib.contextmanager
    def catch_stop_iteration(loop: Any) -> Iterator[None]:
        found = loop_around()
        model = found["self"] if found is not None and found.kind == "fit" else None
        for each in _alive():
            if model is None:
                each.make_equal()
            else:
                each.begin_epoch(model)
        with original(loop):
            yield
        for each in _alive() if model is not None else ():
            each.end_epoch()

    return catch_stop_iteration


def _alive() -> list[LocalTraining]:
    found = [(each, each()) for each in _all]
    _all[:] = [each for each, training in found if training is not None]
    return [training for _, training in found if training is not None]
