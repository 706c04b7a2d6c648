"""Resolves MODEL of `tfdp plan`: a script, a function or a known model."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from tfdp.errors import ConfigurationError
from tfdp.tools.commands.check_target import load_target, parse_target

FORMS = (
    "what `tfdp check` takes (path/to/script.py, path/to/script.py:function, "
    "package.module:function), or the name of a model of keras.applications, such as "
    "ResNet50, which is compiled with Adam"
)
# For models that take images of any size.
IMAGE_SHAPE = (224, 224, 3)
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
# More than any machine has; larger numbers may overflow a float.
MOST_BYTES, MOST_CHARACTERS = 10**18, 80


def bytes_of(text: str) -> int:
    """Parses a size of at most a million terabytes.

    >>> bytes_of("16GB"), bytes_of("1.5 KiB")
    (16000000000, 1536)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", text.upper())
    unit = found[2] if found else ""
    if found and unit not in UNITS:
        unit += "B"  # 16G
    size_bytes = 0
    if found and unit in UNITS and len(text) <= MOST_CHARACTERS:
        size_bytes = round(Fraction(found[1]) * UNITS[unit])
    if not 1 <= size_bytes <= MOST_BYTES:
        shown = text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
        raise ConfigurationError(
            "A size is a number and a unit, such as 16GB or 512MiB, and from 1 byte to "
            f"{MOST_BYTES // UNITS['TB']:,} TB. Received: {shown!r}."
        )
    return size_bytes


def load_model(text: str, batch_rows: int) -> tuple[Callable[[], Any], Any]:
    """The function that builds the compiled model, and a batch as `plan` takes it."""
    import keras

    if text.isidentifier() and callable(getattr(keras.applications, text, None)):
        return _application(getattr(keras.applications, text)), batch_rows
    if text.isidentifier():
        names = [name for name in dir(keras.applications) if name[0].isupper()]
        raise ConfigurationError(
            f"There is no model {text!r} in keras.applications. MODEL is {FORMS}. The "
            f"names: {', '.join(names)}."
        )
    found = load_target(parse_target(text))
    return found.build, _batch_of(found.data, batch_rows)


def _application(constructor: Callable[..., Any]) -> Callable[[], Any]:
    import keras

    def build() -> Any:
        options = {"weights": None, "classifier_activation": None}
        model = constructor(**options)
        if None in model.inputs[0].shape[1:]:
            model = constructor(**options, input_shape=IMAGE_SHAPE)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(), loss, jit_compile=False)
        return model

    return build


def _batch_of(data: Any, batch_rows: int) -> Any:
    import tensorflow as tf

    from tfdp.tools.testing.batches import collect_batches

    [batch] = collect_batches(data, 1, batch_rows)
    return tf.nest.map_structure(
        lambda part: tf.TensorSpec((batch_rows, *part.shape[1:]), part.dtype), batch
    )
