"""Keras' loops over the steps of an epoch, counted, with something around each."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdp._private.frames import is_building_model

__all__ = ["begin_no_epoch_to_build", "lead_loop", "watch_loop"]

InWords = Callable[[], str]
Around = Callable[[InWords, InWords], contextlib.AbstractContextManager[None]]


def lead_loop(loop: Any, around: Around) -> None:
    """Puts `around` about each loop of `fit`, `evaluate` or `predict`.

    Args:
      loop: what leads through its epochs (`frames.loop_of_caller`); None: nothing.
      around: is given what tells how many steps were made so far, in words ("3", or
        "2 times 4" with `steps_per_execution=4`), and how many there are to be.
    """
    if loop is None:
        return
    kind, begun = type(loop), 0

    def counted() -> Iterator[Any]:
        nonlocal begun
        begun = 0
        for place in kind._enumerate_iterator(loop):
            begun += 1
            yield place

    def made() -> str:
        size = loop.steps_per_execution
        return str(begun) if size == 1 else f"{begun} times {size}"

    def planned() -> str:
        return str(loop.num_batches or f"at least {made()}")

    @contextlib.contextmanager
    def catch_stop_iteration() -> Iterator[None]:
        nonlocal begun
        with around(made, planned), kind.catch_stop_iteration(loop):
            try:
                yield
            except (StopIteration, tf.errors.OutOfRangeError):
                begun -= 1  # the one that found the end of the input
                raise

    # Its own dictionary: these two are called by `fit` and by the loop on itself.
    vars(loop).update(
        _enumerate_iterator=counted, catch_stop_iteration=catch_stop_iteration
    )


def begin_no_epoch_to_build(adapter: Any) -> None:
    """Lets a data adapter begin no epoch where a model is built, as on one device.

    A `keras.utils.PyDataset` is told when epochs begin. Its threads (`workers` above 1)
    make batches from then on, and keep them for the next epoch, which then had these
    twice, and others not at all.
    """
    kind = type(adapter)

    def on_epoch_begin() -> None:
        if not is_building_model():
            kind.on_epoch_begin(adapter)

    vars(adapter)["on_epoch_begin"] = on_epoch_begin


def watch_loop(
    loop: Any, first_epoch: int, before_step: Callable[[int, int], bool]
) -> None:
    """Asks before each step of a `fit` whether there is to be one.

    Args:
      loop: what leads through its epochs.
      first_epoch: the number of the first of them.
      before_step: is given the epoch and the batch in it; False ends the epoch.
    """
    if loop is None:
        return
    epochs = itertools.count(first_epoch)

    def watched() -> Iterator[Any]:
        # To build a model Keras begins an epoch, and leaves it after its first batch.
        is_epoch = not is_building_model()
        epoch = next(epochs) if is_epoch else first_epoch
        for begin, end, iterator in type(loop)._enumerate_iterator(loop):
            if not is_epoch:
                yield begin, end, iterator
                continue
            if not before_step(epoch, begin):
                return
            yield begin, end, iterator

    vars(loop)["_enumerate_iterator"] = watched
