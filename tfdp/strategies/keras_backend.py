"""Checks that Keras uses TensorFlow: the strategies exchange its tensors."""

from __future__ import annotations

import os
import sys

from tfdp.errors import ConfigurationError

REQUIRED = "tensorflow"


def check_keras_backend() -> None:
    """Refuses another backend; before Keras is loaded, KERAS_BACKEND decides."""
    variable = os.environ.get("KERAS_BACKEND")
    keras = sys.modules.get("keras")
    found = keras.config.backend() if keras else variable or REQUIRED
    if found == REQUIRED:
        return
    if variable == found:
        setting = f"KERAS_BACKEND={variable}"
    else:
        setting = f"Keras' backend is {found!r}, by ~/.keras/keras.json"
        if variable:
            setting += f", though KERAS_BACKEND={variable} is set by now"
    raise ConfigurationError(
        f"{setting}: a strategy of tfdp works with Keras' backend 'tensorflow' only. "
        "Set KERAS_BACKEND=tensorflow before the first import of keras."
    )
