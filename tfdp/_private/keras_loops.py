"""Overrides of Keras' epoch iterators, which count steps and wrap each loop."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdp._private.host_input import HostIterator
from tfdp._private.keras_calls import is_building_model
from tfdp.seams.replace import replace

Text = Callable[[], str]
# Batches taken from each iterator over the input; None: unknown.
Taken = Callable[[], list[int] | None]
Around = Callable[[Text, Text, Taken], contextlib.AbstractContextManager[None]]


def wrap_loop(loop: Any, around: Around) -> None:
    """Runs each loop of `fit`, `evaluate` or `predict` within `around`.

    Args:
      loop: the epoch iterator (`keras_calls.loop_of_caller`); None: do nothing.
      around: takes functions that return the steps so far as text ("3", or "2 times 4"
        with `steps_per_execution=4`), the planned steps, and the batches taken per
        iterator.
    """
    if loop is None:
        return
    kind, steps, taken = type(loop), 0, _TakenBatches()

    def counted() -> Iterator[Any]:
        nonlocal steps
        steps = 0
        for place in kind._enumerate_iterator(loop):
            steps += 1
            taken.note(place[-1], loop.steps_per_execution)
            yield place

    def made() -> str:
        size = loop.steps_per_execution
        return str(steps) if size == 1 else f"{steps} times {size}"

    def planned() -> str:
        return str(loop.num_batches or f"at least {made()}")

    @contextlib.contextmanager
    def catch_stop_iteration() -> Iterator[None]:
        nonlocal steps
        with around(made, planned, taken.by_iterator), kind.catch_stop_iteration(loop):
            try:
                yield
            except (StopIteration, tf.errors.OutOfRangeError):
                steps -= 1  # this step found the end of the input
                raise

    replace(loop, "_enumerate_iterator", counted)
    replace(loop, "catch_stop_iteration", catch_stop_iteration)


class _TakenBatches:
    """Counts the batches that a loop has taken from each of its iterators."""

    def __init__(self) -> None:
        self._counts: list[int] | None = []
        self._last: Callable[[], Any] = lambda: None

    def note(self, iterator: Any, batches: int) -> None:
        """A step is about to take `batches` of `iterator`."""
        if not isinstance(iterator, tf.distribute.DistributedIterator):
            return  # a placeholder while a model is built
        if not isinstance(iterator, HostIterator):
            # It prefetches from its creation and may be dropped unread, so the order in
            # the input pipeline is unknown.
            self._counts = None
        if self._counts is None:
            return
        if self._last() is not iterator:
            self._last = weakref.ref(iterator)
            self._counts.append(0)
        self._counts[-1] += batches

    def by_iterator(self) -> list[int] | None:
        """The counts in order of the iterators; None: unknown."""
        return None if self._counts is None else list(self._counts)


def raise_instead(loop: Any, error_of: Callable[[Exception], Exception | None]) -> None:
    """Raises `error_of(error)` instead of a TensorFlow error in a loop, unless None."""
    if loop is None:
        return
    catch = loop.catch_stop_iteration  # Keras' own, or an earlier override

    @contextlib.contextmanager
    def catch_stop_iteration() -> Iterator[None]:
        with catch():
            try:
                yield
            except tf.errors.InvalidArgumentError as error:
                instead = error_of(error)
                if instead is None:
                    raise
                raise instead from error

    replace(loop, "catch_stop_iteration", catch_stop_iteration)


def begin_no_epoch_to_build(adapter: Any) -> None:
    """Starts no epoch of a data adapter while Keras builds a model.

    A `keras.utils.PyDataset` with `workers` above 1 starts to make batches when an
    epoch begins, and keeps them: the next epoch would repeat these and miss others.
    """
    kind = type(adapter)

    def on_epoch_begin() -> None:
        if not is_building_model():
            kind.on_epoch_begin(adapter)

    replace(adapter, "on_epoch_begin", on_epoch_begin)


def watch_loop(
    loop: Any, first_epoch: int, before_step: Callable[[int, int], bool]
) -> None:
    """Calls `before_step(epoch, batch)` before each step of `fit`; False ends an epoch.

    `first_epoch` is the number of the first epoch of `loop`, the epoch iterator.
    """
    if loop is None:
        return
    epochs = itertools.count(first_epoch)

    def watched() -> Iterator[Any]:
        # To build a model Keras begins an epoch, and leaves it after its first batch.
        is_epoch = not is_building_model()
        epoch = next(epochs) if is_epoch else first_epoch
        for begin, end, iterator in type(loop)._enumerate_iterator(loop):
            if is_epoch and not before_step(epoch, begin):
                return
            yield begin, end, iterator

    replace(loop, "_enumerate_iterator", watched)
