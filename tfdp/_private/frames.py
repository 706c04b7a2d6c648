"""Every inspection of the call stack by tfdp.

Keras calls the same strategy methods for different purposes, which only the calling
function distinguishes. Checked against Keras 3.12 and 3.15.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import keras
import tensorflow as tf

KERAS_TRAINER_MODULE = "keras.src.backend.tensorflow.trainer"
KERAS_STEP_FUNCTION = "one_step_on_data"
KERAS_BUILD_FUNCTION = "_maybe_symbolic_build"
# Keras creates its TensorFlow variable a few calls above the strategy's creator.
MOST_FRAMES = 40


def number_counted_by_mean() -> Any:
    """The value that the calling `keras.metrics.Mean` counts as one; else None.

    Only for a function that `update_state` calls directly.
    """
    frame = sys._getframe(2)
    if frame.f_code is not keras.metrics.Mean.update_state.__code__:
        return None
    values, weight = map(frame.f_locals.get, ("values", "sample_weight"))
    rank = getattr(getattr(values, "shape", None), "rank", None)
    return values if weight is None and rank == 0 else None


def number_added_by_keras(variable: tf.Variable) -> Any:
    """The value that `keras.Variable.assign_add` is adding to `variable`; else None.

    It calls `assign` with the sum. For `assign_sub` the value is negated.
    """
    kind = keras.Variable
    signs = {kind.assign_add.__code__: 1, kind.assign_sub.__code__: -1}
    for frame in itertools.islice(_frames(), MOST_FRAMES):
        sign = signs.get(frame.f_code)
        if sign and frame.f_locals["self"].value is variable:
            number = tf.cast(frame.f_locals["value"], variable.dtype)
            return number if sign > 0 else -number
    return None


def fit_of_caller() -> tuple[Any, Any] | None:
    """The model and callbacks of the `fit` that creates its input; else None.

    Keras distributes the dataset before it calls callbacks; no public hook has either.
    """
    for frame in _frames_of_trainer():
        if frame.f_code.co_name in ("fit", "evaluate"):
            return frame.f_locals.get("self"), frame.f_locals.get("callbacks")
    return None


def training_input_of_caller() -> dict[str, Any] | None:
    """The locals of a `fit` that creates its training input; else None."""
    for frame in _frames_of_trainer():
        if frame.f_code.co_name == "fit":
            # Keras creates the validation input later.
            is_first = frame.f_locals.get("epoch_iterator") is None
            return dict(frame.f_locals) if is_first else None
        if frame.f_code.co_name in ("evaluate", "predict"):
            return None
    return None


def is_outermost_fit() -> bool:
    """Whether an outermost `fit` creates its training input."""
    return len(list(fits_around())) == 1 and training_input_of_caller() is not None


def fits_around(frame: FrameType | None = None) -> Iterator[dict[str, Any]]:
    """The locals of each `fit` around a frame (None: the caller's), innermost first."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "fit" and _is_of_trainer(frame):
            yield frame.f_locals
        frame = frame.f_back


def loop_around() -> tuple[str, dict[str, Any]]:
    """The surrounding Keras loop ("fit", "evaluate", "predict", "") and its locals."""
    for frame in _frames_of_trainer():
        if frame.f_code.co_name in ("fit", "evaluate", "predict"):
            return frame.f_code.co_name, frame.f_locals
    return "", {}


def batch_size_of_caller() -> tuple[str | None, int | None]:
    """The class name of the calling Keras loop's data adapter, and its batch size."""
    loop = loop_of_caller()
    if loop is None:
        return None, None
    return type(loop.data_adapter).__name__, loop.data_adapter.batch_size


def adapter_of_caller() -> Any:
    """The data adapter of the Keras loop that creates its input; else None."""
    return getattr(loop_of_caller(), "data_adapter", None)


def loop_of_caller() -> Any:
    """The epoch iterator of the Keras loop that creates its input; else None."""
    for frame in _frames_of_trainer():
        loop = frame.f_locals.get("self")
        if getattr(loop, "data_adapter", None) is not None:
            return loop
    return None


def is_building_model() -> bool:
    """Whether Keras is building a model from the first batch of its input."""
    names = (frame.f_code.co_name for frame in _frames_of_trainer())
    return KERAS_BUILD_FUNCTION in names


def is_called_by_keras_loop() -> bool:
    """Whether the caller's caller is Keras' `fit` or `evaluate`, about to report.

    Keras averages the results over replicas; a custom loop gets each replica's own.
    """
    frame = sys._getframe(2)
    return frame.f_code.co_name == KERAS_STEP_FUNCTION and _is_of_trainer(frame)


def model_built_by_caller() -> Any:
    """The model that the caller's caller builds symbolically; else None.

    There Keras calls `strategy.reduce("MEAN", <a real batch>)` only for shapes and
    dtypes. The arguments look like a user's reduction, which must stay one.
    """
    frame = sys._getframe(2)
    if frame.f_code.co_name == KERAS_BUILD_FUNCTION and _is_of_trainer(frame):
        return frame.f_locals.get("self")
    return None


def is_made_for_autocast() -> bool:
    """Whether the variable being created belongs to a Keras variable that autocasts.

    Not with `layer.add_weight(autocast=False)`.
    """
    for frame in itertools.islice(_frames(), MOST_FRAMES):
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "_initialize" and isinstance(owner, keras.Variable):
            return bool(owner._autocast)
    return False


def _frames() -> Iterator[FrameType]:
    """The frames below the iterating one, innermost first."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frames_of_trainer() -> Iterator[FrameType]:
    return filter(_is_of_trainer, _frames())


def _is_of_trainer(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == KERAS_TRAINER_MODULE
