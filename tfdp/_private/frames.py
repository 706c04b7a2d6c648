"""Every inspection of the call stack by tfdp.

Keras gives strategies and callbacks neither the `fit` in which they run nor what it was
given. `tfdp.seams.table.LOOKS` lists each function and each of its local variables that
is read here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from tfdp.errors import SeamError
from tfdp.seams.table import KERAS_TRAINER, LOOKS, checked_versions, names_in

LOOPS = ("fit", "evaluate", "predict")
# The functions that call `strategy.run`, and whether they average what it returns.
STEPS = {"one_step_on_data": True, "one_step_on_data_distributed": False}
_LOCALS = {look.function: look.names for look in LOOKS}
# The packages that Keras 2 is in.
KERAS_2 = ("tf_keras", "tensorflow.python.keras")


class KerasLoop:
    """A `fit`, `evaluate` or `predict` of Keras around the caller."""

    def __init__(self, frame: FrameType):
        #: "fit", "evaluate" or "predict".
        self.kind = frame.f_code.co_name
        self._frame = frame

    def __getitem__(self, name: str) -> Any:
        """The value of a local variable now; None before Keras assigns it."""
        code, values = self._frame.f_code, self._frame.f_locals
        is_listed = name in _LOCALS[self.kind]
        if is_listed and name in values:
            return values[name]
        is_argument = name in code.co_varnames[: code.co_argcount]
        if not is_listed or is_argument or name not in names_in(code):
            raise SeamError(
                f"tfdp reads the local variable {name!r} of {self.kind} of Keras' "
                "trainer, which has no such variable, or is not in the table of looks. "
                f"{checked_versions()}"
            )
        return None

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks, as given or as Keras completed them."""
        given = self["callbacks"]
        listed = getattr(given, "callbacks", given)
        is_many = isinstance(listed, (list, tuple))
        return [*listed] if is_many else [listed] if listed else []


def loops_around(frame: FrameType | None = None) -> Iterator[KerasLoop]:
    """The Keras loops around a frame (None: the caller's), innermost first."""
    frame = frame or sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in LOOPS and _is_of_trainer(frame):
            yield KerasLoop(frame)
        frame = frame.f_back


def fits_around(frame: FrameType | None = None) -> Iterator[KerasLoop]:
    """Each `fit` around a frame (None: the caller's), innermost first."""
    return (loop for loop in loops_around(frame) if loop.kind == "fit")


def loop_around() -> KerasLoop | None:
    """The innermost loop around the caller."""
    return next(loops_around(), None)


def fit_of_caller() -> KerasLoop | None:
    """The `fit` or `evaluate` around the caller; else None."""
    return next((loop for loop in loops_around() if loop.kind != "predict"), None)


def training_input_of_caller() -> KerasLoop | None:
    """The `fit` that creates its training input; else None."""
    loop = loop_around()
    # Keras creates the validation input later.
    is_first = loop and loop.kind == "fit" and loop["epoch_iterator"] is None
    return loop if is_first else None


def is_called_by_keras_loop() -> bool:
    """Whether the caller's caller is a step of Keras' loop, about to report.

    Keras averages the results over replicas; a custom loop gets each replica's own.
    """
    frame = sys._getframe(2)
    if not _is_of_trainer(frame):
        return False
    if frame.f_code.co_name not in STEPS:
        raise SeamError(
            f"{frame.f_code.co_name} of Keras' trainer calls strategy.run, and not one "
            f"of {', '.join(STEPS)}. {checked_versions()}"
        )
    return STEPS[frame.f_code.co_name]


def is_called_by_keras_2() -> bool:
    """Whether a function of Keras 2 is around the caller."""
    frame = sys._getframe() if any(name in sys.modules for name in KERAS_2) else None
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module.startswith(tuple(f"{name}." for name in KERAS_2)):
            return True
        frame = frame.f_back
    return False


def _is_of_trainer(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == KERAS_TRAINER
