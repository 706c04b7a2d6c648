"""Loads a script with a layout for `tfdp plan`, without values of its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdp._private.first_fit import lenient_layouts, noted_layout
from tfdp._private.keras_models import build_as_declared, large_variables_left_empty
from tfdp.errors import ConfigurationError
from tfdp.strategies.keras_distribution import note_keras_distribution
from tfdp.tools.commands.check_target import Target, is_run
from tfdp.tools.planning.layouts import LayoutTable, layout_table
from tfdp.tools.planning.traced_step import batch_of

# Smaller weights get values, such as the states of random generators.
LEAST_EMPTY_BYTES = 4096


@contextlib.contextmanager
def loading_layouts(target: Target | str, replicas: int) -> Iterator[dict[str, str]]:
    """Lets a script make any mesh and layout; yields the rules that Keras refuses.

    A script that is run makes its model in the scope of one device, in which `build`
    gives that model, and runs no second time.
    """
    note_keras_distribution(replicas)
    with contextlib.ExitStack() as stack:
        refused = stack.enter_context(lenient_layouts())
        stack.enter_context(large_variables_left_empty(LEAST_EMPTY_BYTES))
        if isinstance(target, Target) and is_run(target):
            stack.enter_context(tf.distribute.OneDeviceStrategy("CPU:0").scope())
        yield refused


def table_of_script(
    name: str, build: Callable[[], Any], batch: Any, refused: dict[str, str]
) -> LayoutTable:
    """The table of the layout that the script has given.

    Raises ConfigurationError if it has given none.
    """
    model = build()
    layout = noted_layout()
    if layout is None:
        raise ConfigurationError(
            f"--layout: {name} gives no layout. Call keras.distribution."
            "set_distribution(ModelParallel(layout_map=...)) in it, or give a strategy "
            "layout= (docs/axes.md)."
        )
    if not model.built:
        build_as_declared(model, batch_of(batch, model).zeros(1))
    return layout_table(name, model, layout, refused)
