"""Keras' loops over the steps of an epoch, counted, with something around each."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdp._private.frames import is_building_model, loop_of_caller
from tfdp._private.host_input import HostIterator

__all__ = [
    "begin_no_epoch_to_build",
    "wrap_loop",
    "noticing_loops",
    "raise_instead",
    "watch_loop",
]

InWords = Callable[[], str]
# How many batches steps have taken from each iterator over the input; None: unknown.
Taken = Callable[[], list[int] | None]
Around = Callable[[InWords, InWords, Taken], contextlib.AbstractContextManager[None]]


def wrap_loop(loop: Any, around: Around) -> None:
    """Puts `around` about each loop of `fit`, `evaluate` or `predict`.

    Args:
      loop: what leads through its epochs (`frames.loop_of_caller`); None: nothing.
      around: is given what tells how many steps were made so far, in words ("3", or
        "2 times 4" with `steps_per_execution=4`), how many there are to be, and how
        many batches were taken from each iterator at most.
    """
    if loop is None:
        return
    kind, begun, taken = type(loop), 0, _TakenBatches()

    def counted() -> Iterator[Any]:
        nonlocal begun
        begun = 0
        for place in kind._enumerate_iterator(loop):
            begun += 1
            taken.note(place[-1], loop.steps_per_execution)
            yield place

    def made() -> str:
        size = loop.steps_per_execution
        return str(begun) if size == 1 else f"{begun} times {size}"

    def planned() -> str:
        return str(loop.num_batches or f"at least {made()}")

    @contextlib.contextmanager
    def catch_stop_iteration() -> Iterator[None]:
        nonlocal begun
        with around(made, planned, taken.by_iterator), kind.catch_stop_iteration(loop):
            try:
                yield
            except (StopIteration, tf.errors.OutOfRangeError):
                begun -= 1  # the one that found the end of the input
                raise

    # Its own dictionary: these two are called by `fit` and by the loop on itself.
    vars(loop).update(
        _enumerate_iterator=counted, catch_stop_iteration=catch_stop_iteration
    )


class _TakenBatches:
    """How many batches a loop has taken from each iterator that it has begun."""

    def __init__(self) -> None:
        self._counts: list[int] | None = []
        self._last: Callable[[], Any] = lambda: None

    def note(self, iterator: Any, batches: int) -> None:
        """Notes that a step is about to take so many batches of `iterator`."""
        if not isinstance(iterator, tf.distribute.DistributedIterator):
            return  # what stands for a batch where a model is built
        if not isinstance(iterator, HostIterator):
            # It reads ahead from the moment when it is made, and may be dropped unread:
            # which one the input pipeline sees as number n is not known.
            self._counts = None
        if self._counts is None:
            return
        if self._last() is not iterator:
            self._last = weakref.ref(iterator)
            self._counts.append(0)
        self._counts[-1] += batches

    def by_iterator(self) -> list[int] | None:
        """The counts, in the order in which the iterators were begun; None: unknown."""
        return None if self._counts is None else list(self._counts)


def noticing_loops(distributed: Any, on_loop: Callable[[Any], None]) -> Any:
    """`distributed`, a distributed dataset, which notices loops that read it.

    Keras gives a strategy no word of a dataset that was distributed before. It reads
    its `cardinality` while it makes the loop.

    Args:
      distributed: the dataset; it is changed.
      on_loop: called with what leads through the epochs, once for each loop.
    """
    kind: Any = type(distributed)

    class Noticing(kind):
        @property
        def cardinality(self) -> Any:
            loop = loop_of_caller()
            if loop is not None and "catch_stop_iteration" not in vars(loop):
                on_loop(loop)
            return super().cardinality

    distributed.__class__ = Noticing
    return distributed


def raise_instead(loop: Any, error_of: Callable[[Exception], Exception | None]) -> None:
    """Lets a loop end with the errors of tfdp that TensorFlow's stand for.

    Args:
      loop: what leads through its epochs (`frames.loop_of_caller`); None: nothing.
      error_of: gives that error; None: it stands for none.
    """
    if loop is None:
        return
    catch = loop.catch_stop_iteration  # Keras' own, or that of who leads it already

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

    vars(loop)["catch_stop_iteration"] = catch_stop_iteration


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
