"""Whether Keras computes with TensorFlow: the strategies move TensorFlow's tensors."""

from __future__ import annotations

import os
import sys

from tfdp.errors import ConfigurationError

REQUIRED = "tensorflow"


def check_keras_backend() -> None:
    """Refuses a Keras whose arrays a strategy of TensorFlow does not see.

    Before Keras is loaded only the variable KERAS_BACKEND tells.

    Raises:
      ConfigurationError: it is not TensorFlow.
    """
    variable = os.environ.get("KERAS_BACKEND")
    keras = sys.modules.get("keras")
    found = keras.config.backend() if keras else variable or REQUIRED
    if found == REQUIRED:
        return
    if variable == found:
        who = f"KERAS_BACKEND={variable}"
    else:
        who = f"Keras' backend is {found!r}, by ~/.keras/keras.json"
        if variable:
            who += f", though KERAS_BACKEND={variable} is set by now"
    raise ConfigurationError(
        f"{who}: a strategy of tfdp works with Keras' backend 'tensorflow' only. Set "
        "KERAS_BACKEND=tensorflow before the first import of keras."
    )
