"""Who asks: every look at the call stack that tfdp takes.

Keras asks a strategy the same things for different ends, and tells only by the place
from which it asks. Checked against Keras 3.12 and 3.15.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import keras

__all__ = [
    "batch_size_of_caller",
    "fit_of_caller",
    "frame_of_caller",
    "is_building_model",
    "is_called_by_keras_loop",
    "is_made_for_autocast",
    "model_built_by_caller",
]

KERAS_TRAINER_MODULE = "keras.src.backend.tensorflow.trainer"
KERAS_STEP_FUNCTION = "one_step_on_data"
KERAS_BUILD_FUNCTION = "_maybe_symbolic_build"

# Keras makes its TensorFlow variable a few calls above the creator of the strategy.
MOST_FRAMES = 40


def frame_of_caller() -> FrameType:
    """The frame of the caller's caller's caller: who asks the function that asks."""
    return sys._getframe(3)


def fit_of_caller() -> tuple[Any, Any] | None:
    """The model and the callbacks of the `fit` that makes its input; None: no `fit`.

    Keras asks the strategy to distribute the dataset before it looks at the callbacks;
    no public hook is told about either.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == KERAS_TRAINER_MODULE:
            if frame.f_code.co_name in ("fit", "evaluate"):
                return frame.f_locals.get("self"), frame.f_locals.get("callbacks")
        frame = frame.f_back
    return None


def batch_size_of_caller() -> tuple[str | None, int | None]:
    """What the Keras loop that makes its input knows of the size of its batches.

    Returns:
      The name of the class of its data adapter, and the size; None for what is not
      known.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == KERAS_TRAINER_MODULE:
            adapter = getattr(frame.f_locals.get("self"), "data_adapter", None)
            if adapter is not None:
                return type(adapter).__name__, adapter.batch_size
        frame = frame.f_back
    return None, None


def is_building_model() -> bool:
    """Whether Keras is about to build a model from the first batch of its input."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        is_trainer = frame.f_globals.get("__name__") == KERAS_TRAINER_MODULE
        if is_trainer and frame.f_code.co_name == KERAS_BUILD_FUNCTION:
            return True
        frame = frame.f_back
    return False


def is_called_by_keras_loop() -> bool:
    """Whether the caller's caller is Keras' `fit` or `evaluate`, about to report.

    Keras averages what the step returns on each replica; a user who runs the step in a
    loop of their own gets each replica's own.
    """
    frame = sys._getframe(2)
    return (
        frame.f_code.co_name == KERAS_STEP_FUNCTION
        and frame.f_globals.get("__name__") == KERAS_TRAINER_MODULE
    )


def model_built_by_caller() -> Any:
    """The model whose symbolic build is the caller's caller; None: another caller.

    Keras calls `strategy.reduce("MEAN", <a real batch>)` there, only to learn shapes
    and dtypes. It is told from a user's reduction by the calling function, because
    the arguments look the same and a user's reduction must stay a reduction.
    """
    frame = sys._getframe(2)
    if (
        frame.f_code.co_name == KERAS_BUILD_FUNCTION
        and frame.f_globals.get("__name__") == KERAS_TRAINER_MODULE
    ):
        return frame.f_locals.get("self")
    return None


def is_made_for_autocast() -> bool:
    """Whether the variable that is being made belongs to a Keras variable that casts.

    `layer.add_weight(autocast=False)` makes one that does not.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MOST_FRAMES):
        if frame is None:
            return False
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "_initialize" and isinstance(owner, keras.Variable):
            return bool(owner._autocast)
        frame = frame.f_back
    return False
