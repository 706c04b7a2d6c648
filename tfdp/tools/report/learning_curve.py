"""Draws the learning curve of a training, as a PNG or SVG file."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdp.errors import ConfigurationError
from tfdp.files.atomic import replaced
from tfdp.tools.report.plots import Chart, new_figure, plot_lines

_SUFFIXES = (".png", ".svg")
_COLUMNS = 3


def write_learning_curve(
    history: Any, path: str | os.PathLike[str], *, title: str = "Learning curve"
) -> Path:
    """Draws each metric over the epochs, training and validation in one panel.

    Args:
      history: the result of `model.fit`, or its `history`: metric name to one value for
        each epoch. `loss` and `val_loss` share a panel.
      path: the file to write, ending in `.png` or `.svg`.
      title: the line above the panels.

    Returns:
      The path of the written file.

    Raises:
      ConfigurationError: the history is empty or not numeric, or the ending is another.
      MissingDependencyError: matplotlib is not installed.

    ```python
    from tfdp.tools.report import write_learning_curve

    history = {"loss": [0.9, 0.4, 0.2], "val_loss": [0.8, 0.5, 0.4]}
    print(write_learning_curve(history, "curve.png").name)  # curve.png
    ```
    """
    path = Path(path)
    if path.suffix not in _SUFFIXES:
        raise ConfigurationError(
            f"the path of a learning curve ends in {' or '.join(_SUFFIXES)}. "
            f"Received: {path}."
        )
    charts = _charts(history)
    columns = min(_COLUMNS, len(charts))
    rows = math.ceil(len(charts) / columns)
    with new_figure(4.4 * columns, 3.4 * rows) as figure:
        figure.set_layout_engine("constrained")
        figure.suptitle(title)
        for place, chart in enumerate(charts, start=1):
            plot_lines(figure.add_subplot(rows, columns, place), chart)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as half_written:
            figure.savefig(half_written, dpi=120, metadata={"Title": title})
    return path


def _charts(history: Any) -> list[Chart]:
    curves = getattr(history, "history", history)
    if not isinstance(curves, Mapping) or not any(map(len, curves.values())):
        raise ConfigurationError(
            "a learning curve needs at least one epoch of at least one metric. "
            f"Received: {curves!r}."
        )
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for name, values in curves.items():
        if not all(isinstance(value, numbers.Real) for value in values):
            raise ConfigurationError(
                f"the values of {name!r} must be numbers, one for each epoch. "
                f"Received: {values!r}."
            )
        metric = name.removeprefix("val_")
        line = "training" if name == metric else "validation"
        panels.setdefault(metric, {})[line] = list(enumerate(map(float, values), 1))
    return [
        Chart(metric.replace("_", " "), lines, "epoch")
        for metric, lines in panels.items()
    ]
