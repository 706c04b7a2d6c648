"""Who asks: every look at the call stack that tfdp takes.

Keras asks a strategy the same things for different ends, and tells only by the place
from which it asks. Checked against Keras 3.12 and 3.15.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import keras
import tensorflow as tf

__all__ = [
    "adapter_of_caller",
    "batch_size_of_caller",
    "fit_of_caller",
    "fits_around",
    "frame_of_caller",
    "is_building_model",
    "is_called_by_keras_loop",
    "is_made_for_autocast",
    "is_outermost_fit",
    "loop_around",
    "loop_of_caller",
    "model_built_by_caller",
    "number_added_by_keras",
    "number_counted_by_mean",
    "training_input_of_caller",
]

KERAS_TRAINER_MODULE = "keras.src.backend.tensorflow.trainer"
KERAS_STEP_FUNCTION = "one_step_on_data"
KERAS_BUILD_FUNCTION = "_maybe_symbolic_build"

# Keras makes its TensorFlow variable a few calls above the creator of the strategy.
MOST_FRAMES = 40


def frame_of_caller() -> FrameType:
    """The frame of the caller's caller's caller: who asks the function that asks."""
    return sys._getframe(3)


def number_counted_by_mean() -> Any:
    """What `keras.metrics.Mean` counts as one, whatever it is of; None: it does not.

    Asked by what it calls to count: its own code is the caller's caller.
    """
    frame = sys._getframe(2)
    if frame.f_code is not keras.metrics.Mean.update_state.__code__:
        return None
    values, weight = map(frame.f_locals.get, ("values", "sample_weight"))
    rank = getattr(getattr(values, "shape", None), "rank", None)
    return values if weight is None and rank == 0 else None


def number_added_by_keras(variable: tf.Variable) -> Any:
    """What `keras.Variable.assign_add` is adding to `variable`; None: another caller.

    It assigns the sum. What `assign_sub` takes away is less than 0.
    """
    signs = {
        keras.Variable.assign_add.__code__: 1,
        keras.Variable.assign_sub.__code__: -1,
    }
    for frame in itertools.islice(_frames(), MOST_FRAMES):
        sign = signs.get(frame.f_code)
        if sign and frame.f_locals["self"].value is variable:
            number = tf.cast(frame.f_locals["value"], variable.dtype)
            return number if sign > 0 else -number
    return None


def fit_of_caller() -> tuple[Any, Any] | None:
    """The model and the callbacks of the `fit` that makes its input; None: no `fit`.

    Keras asks the strategy to distribute the dataset before it looks at the callbacks;
    no public hook is told about either.
    """
    for frame in _frames_of_trainer():
        if frame.f_code.co_name in ("fit", "evaluate"):
            return frame.f_locals.get("self"), frame.f_locals.get("callbacks")
    return None


def training_input_of_caller() -> dict[str, Any] | None:
    """What a `fit` holds that makes the input it trains on; None: another caller."""
    for frame in _frames_of_trainer():
        if frame.f_code.co_name == "fit":
            # Keras makes the input of the validation later.
            is_first = frame.f_locals.get("epoch_iterator") is None
            return dict(frame.f_locals) if is_first else None
        if frame.f_code.co_name in ("evaluate", "predict"):
            return None
    return None


def is_outermost_fit() -> bool:
    """Whether a `fit` makes the input it trains on, and runs in no other one."""
    return len(list(fits_around())) == 1 and training_input_of_caller() is not None


def fits_around(frame: FrameType | None = None) -> Iterator[dict[str, Any]]:
    """What each `fit` holds in which a frame runs, innermost first.

    Args:
      frame: None: the caller's.
    """
    frame = frame or sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "fit" and _is_of_trainer(frame):
            yield frame.f_locals
        frame = frame.f_back


def loop_around() -> tuple[str, dict[str, Any]]:
    """Which loop of Keras the caller runs in, and what it holds.

    Returns:
      "fit", "evaluate" or "predict", and its local variables; "" outside of them.
    """
    for frame in _frames_of_trainer():
        if frame.f_code.co_name in ("fit", "evaluate", "predict"):
            return frame.f_code.co_name, frame.f_locals
    return "", {}


def batch_size_of_caller() -> tuple[str | None, int | None]:
    """What the Keras loop that makes its input knows of the size of its batches.

    Returns:
      The name of the class of its data adapter, and the size; None for what is not
      known.
    """
    loop = loop_of_caller()
    if loop is None:
        return None, None
    return type(loop.data_adapter).__name__, loop.data_adapter.batch_size


def adapter_of_caller() -> Any:
    """The data adapter of the Keras loop that makes its input; None: no such loop."""
    return getattr(loop_of_caller(), "data_adapter", None)


def loop_of_caller() -> Any:
    """What leads through the epochs of the Keras loop that makes its input, or None."""
    for frame in _frames_of_trainer():
        loop = frame.f_locals.get("self")
        if getattr(loop, "data_adapter", None) is not None:
            return loop
    return None


def is_building_model() -> bool:
    """Whether Keras is about to build a model from the first batch of its input."""
    return any(
        frame.f_code.co_name == KERAS_BUILD_FUNCTION for frame in _frames_of_trainer()
    )


def is_called_by_keras_loop() -> bool:
    """Whether the caller's caller is Keras' `fit` or `evaluate`, about to report.

    Keras averages what the step returns on each replica; a user who runs the step in a
    loop of their own gets each replica's own.
    """
    frame = sys._getframe(2)
    return frame.f_code.co_name == KERAS_STEP_FUNCTION and _is_of_trainer(frame)


def model_built_by_caller() -> Any:
    """The model whose symbolic build is the caller's caller; None: another caller.

    Keras calls `strategy.reduce("MEAN", <a real batch>)` there, only to learn shapes
    and dtypes. It is told from a user's reduction by the calling function, because
    the arguments look the same and a user's reduction must stay a reduction.
    """
    frame = sys._getframe(2)
    if frame.f_code.co_name == KERAS_BUILD_FUNCTION and _is_of_trainer(frame):
        return frame.f_locals.get("self")
    return None


def is_made_for_autocast() -> bool:
    """Whether the variable that is being made belongs to a Keras variable that casts.

    `layer.add_weight(autocast=False)` makes one that does not.
    """
    for frame in itertools.islice(_frames(), MOST_FRAMES):
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "_initialize" and isinstance(owner, keras.Variable):
            return bool(owner._autocast)
    return False


def _frames() -> Iterator[FrameType]:
    """Those below the one that iterates, innermost first."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frames_of_trainer() -> Iterator[FrameType]:
    return filter(_is_of_trainer, _frames())


def _is_of_trainer(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == KERAS_TRAINER_MODULE
