"""Lets TensorFlow's calls into Python finish before the interpreter shuts down.

Python kills a thread that wants to run during shutdown, and TensorFlow waits forever in
a destructor for what that thread was computing (a prefetched batch). So at exit we wait
for running calls, and drop what the last error keeps alive: its frames hold iterators,
and those hold prefetching threads.
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

from tfdp.errors import TfdpError

# Calls that wait for other workers are woken earlier; the others are short.
LONGEST_SECONDS = 60.0
LAST_ERROR = ("last_type", "last_value", "last_traceback", "last_exc")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class PythonCalls:
    """Counts the calls that are running, on any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = 0

    def counted(
        self, function: Callable[Arguments, Result]
    ) -> Callable[Arguments, Result]:

        @functools.wraps(function)
        def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
            with self._changed:
                self._under_way += 1
            try:
                return function(*arguments, **options)
            except TfdpError as error:
                # TensorFlow puts frames and causes into its own message.
                raise error.with_traceback(None) from None
            finally:
                with self._changed:
                    self._under_way -= 1
                    self._changed.notify_all()

        return call

    def wait_for_end(self, seconds: float) -> bool:
        """Waits until no call is running; false if one still is after `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._under_way == 0, seconds)


_calls = PythonCalls()
#: Wraps what `tf.numpy_function` calls: the process waits at exit until it has ended.
counted = _calls.counted


@functools.cache
def let_calls_end_at_exit() -> None:
    """Waits for running calls at exit; what wakes them must be registered later."""
    atexit.register(_let_calls_end)


def _let_calls_end() -> None:
    if not _calls.wait_for_end(LONGEST_SECONDS):
        logging.error(
            "tfdp: A call of Python by TensorFlow has not ended after "
            f"{LONGEST_SECONDS:g} seconds. This process may hang at exit."
        )
        return
    if getattr(sys, "last_value", None) is not None:
        for name in LAST_ERROR:
            if hasattr(sys, name):
                delattr(sys, name)
        # An error and the frames in its traceback refer to each other.
        gc.collect()
