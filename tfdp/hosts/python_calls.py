"""Calls of Python that threads of TensorFlow are in: the interpreter ends behind them.

Python ends a thread on the spot that asks to run while the interpreter shuts down.
TensorFlow is not told: what such a thread was computing, a batch that a pipeline reads
ahead, never comes, and the process waits for it in a destructor for ever, after it has
printed its error. So, before the interpreter shuts down, the calls that are under way
are let end, and what an error has kept of a training (its frames hold iterators, and
they the threads that read ahead) is dropped while Python still runs.
"""

from __future__ import annotations

import atexit
import functools
import gc
import sys
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from absl import logging

# Whoever waits for others inside of a call is woken before; the rest takes no time.
LONGEST_SECONDS = 60.0
LAST_ERROR = ("last_type", "last_value", "last_traceback", "last_exc")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class PythonCalls:
    """How many calls are under way, on any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = 0

    def counted(
        self, function: Callable[Arguments, Result]
    ) -> Callable[Arguments, Result]:
        """`function`, whose calls are counted while they last."""

        @functools.wraps(function)
        def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
            with self._changed:
                self._under_way += 1
            try:
                return function(*arguments, **options)
            finally:
                with self._changed:
                    self._under_way -= 1
                    self._changed.notify_all()

        return call

    def wait_for_end(self, seconds: float) -> bool:
        """Whether none is under way, after waiting for so long at most."""
        with self._changed:
            return self._changed.wait_for(lambda: self._under_way == 0, seconds)


_calls = PythonCalls()
#: For what is handed to `tf.numpy_function`.
counted = _calls.counted


@functools.cache
def let_calls_end_at_exit() -> None:
    """From now on the interpreter ends behind the calls that are under way.

    What is registered with `atexit` later comes before: what wakes those that wait.
    """
    atexit.register(_let_calls_end)


def _let_calls_end() -> None:
    if not _calls.wait_for_end(LONGEST_SECONDS):
        logging.error(
            "tfdp: A call of Python by TensorFlow has not ended after %.0f seconds. "
            "This process may not come to its end.",
            LONGEST_SECONDS,
        )
        return
    if getattr(sys, "last_value", None) is not None:
        for name in LAST_ERROR:
            if hasattr(sys, name):
                delattr(sys, name)
        # An error and the frames that it has come through hold each other.
        gc.collect()
