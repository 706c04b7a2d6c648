"""Resolves MODEL of `tfdp plan`: a script, a function or a known model."""

from __future__ import annotations

import importlib.util
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from tfdp.checks import did_you_mean
from tfdp.errors import ConfigurationError
from tfdp.tools.commands import check_target
from tfdp.tools.commands.check_target import ScriptRun, Target, load_target

FORMS = (
    f"{check_target.FORMS}, or the name of a model of keras.applications, such as "
    f"ResNet50, which is compiled with Adam. {check_target.RUN}"
)
BATCH_HELP = "rows of all replicas together (default: those of the script's fit)"
# For models that take images of any size.
IMAGE_SHAPE = (224, 224, 3)


def parse_model(text: str, arguments: Sequence[str], rows: int | None) -> Target | str:
    """A target, or the name of a model of keras.applications; imports nothing.

    Raises:
      ConfigurationError: its form is unknown, or nothing gives the rows of a batch.
    """
    target = text if text.isidentifier() else check_target.parse_target(text, arguments)
    is_run = isinstance(target, Target) and check_target.is_run(target)
    if rows is None and not is_run:
        raise ConfigurationError(
            f"--batch is needed: {text} does not call fit, which would give the rows "
            "of a batch."
        )
    if isinstance(target, str) and arguments:
        raise ConfigurationError(
            f"{text} is a model of keras.applications and takes no arguments. Leave "
            f"out `-- {' '.join(arguments)}`."
        )
    return target


def check_model(target: Target | str) -> None:
    """Refuses a name that does not exist; imports no TensorFlow.

    Raises:
      ConfigurationError: there is no such module, or model of keras.applications.
    """
    if isinstance(target, Target):
        check_target.check_module(target)
        return
    names = _names_of_applications()
    if names and target not in names:
        raise ConfigurationError(
            f"There is no model {target!r} in keras.applications."
            f"{did_you_mean(target, names)} MODEL is {FORMS} The names: "
            f"{', '.join(names)}."
        )


def _names_of_applications() -> list[str]:
    """Names read in Keras' source, as its import takes seconds; [] without Keras."""
    keras = importlib.util.find_spec("keras")
    if keras is None or keras.origin is None:
        return []
    path = pathlib.Path(keras.origin).with_name("applications") / "__init__.py"
    if not path.is_file():
        return []
    return sorted(set(re.findall(r"import ([A-Z]\w*) as \1", path.read_text("utf-8"))))


def load_model(
    target: Target | str, batch_rows: int | None, replicas: int
) -> tuple[Callable[[], Any], Any]:
    """The function that builds the compiled model, and a batch as `plan` takes it.

    `batch_rows`: None for those of the script's fit; `replicas`: on all hosts.
    """
    import keras

    import tfdp

    if isinstance(target, Target):

        def for_script() -> Any:
            return tfdp.DataParallelStrategy(["CPU:0"], alone=True)

        found = load_target(target, ScriptRun(for_script, replicas))
        rows = batch_rows or found.options["batch_size"]
        return found.build, _batch_of(found.data, rows)
    if batch_rows and callable(getattr(keras.applications, target, None)):
        return _application(getattr(keras.applications, target)), batch_rows
    raise ConfigurationError(f"There is no model {target!r} in keras.applications.")


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
