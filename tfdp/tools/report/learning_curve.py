"""Draws the learning curve of a training: a PNG, or a self-contained HTML page."""

from __future__ import annotations

import importlib.util
import math
import numbers
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdp.errors import ConfigurationError
from tfdp.files.atomic import replaced
from tfdp.tools.report.charts import MOST_TICKS, Chart, draw_chart, ticks_between
from tfdp.tools.report.html_page import html_page

Curve = Sequence[float]
# Panel title -> line name -> one value for each epoch.
Panels = dict[str, dict[str, Curve]]

_SUFFIXES = (".png", ".html")
_COLUMNS = 3


def write_learning_curve(
    history: Any, path: str | os.PathLike[str], *, title: str = "Learning curve"
) -> Path:
    """Draws each metric over the epochs, training and validation in one panel.

    matplotlib draws a `.png`. If it is not installed, and for `.html`, the result is a
    self-contained HTML page with the curves as SVG.

    Args:
      history: the result of `model.fit`, or its `history`: metric name to one value for
        each epoch. `loss` and `val_loss` share a panel.
      path: the file to write, ending in `.png` or `.html`.
      title: the line above the panels.

    Returns:
      The path of the written file: `path`, but ending in `.html` if a PNG was requested
      and matplotlib is not installed.

    Raises:
      ConfigurationError: the history is empty or not numeric, or the ending is another.

    ```python
    from tfdp.tools.report import write_learning_curve

    history = {"loss": [0.9, 0.4, 0.2], "val_loss": [0.8, 0.5, 0.4]}
    print(write_learning_curve(history, "curve.html").name)  # curve.html
    ```
    """
    path = Path(path)
    if path.suffix not in _SUFFIXES:
        raise ConfigurationError(
            f"the path of a learning curve ends in {' or '.join(_SUFFIXES)}. "
            f"Received: {path}."
        )
    panels = _panels(history)
    if path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        path = path.with_suffix(".html")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as half_written:
        if path.suffix == ".png":
            _draw_png(panels, title, half_written)
        else:
            half_written.write_text(draw_page(panels, title), "utf-8")
    return path


def _panels(history: Any) -> Panels:
    curves = getattr(history, "history", history)
    if not isinstance(curves, Mapping) or not any(map(len, curves.values())):
        raise ConfigurationError(
            "a learning curve needs at least one epoch of at least one metric. "
            f"Received: {curves!r}."
        )
    panels: Panels = {}
    for name, values in curves.items():
        if not all(isinstance(value, numbers.Real) for value in values):
            raise ConfigurationError(
                f"the values of {name!r} must be numbers, one for each epoch. "
                f"Received: {values!r}."
            )
        metric = name.removeprefix("val_")
        line = "training" if name == metric else "validation"
        panels.setdefault(metric, {})[line] = list(map(float, values))
    return panels


def _draw_png(panels: Panels, title: str, path: Path) -> None:
    # Without pyplot, which picks a window system and keeps the figure alive.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    columns = min(_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.4 * columns, 3.4 * rows), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (metric, lines) in zip(axes.flat, panels.items(), strict=False):
        for name, values in lines.items():
            epochs = range(1, len(values) + 1)
            axis.plot(epochs, values, marker="o", markersize=3, label=name)
        axis.set_title(metric.replace("_", " "))
        axis.set_xlabel("epoch")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        if len(lines) > 1:
            axis.legend()
    figure.savefig(path, format="png", dpi=120)


STYLE = "svg { margin: 0 12px 12px 0; }\n"


def draw_page(
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    title: str,
    places: Sequence[str] = (),
    place_name: str = "epoch",
) -> str:
    """The HTML page with one panel for each metric.

    Args:
      panels: metric -> line name -> one value for each epoch or place; values that are
        not finite leave a gap.
      title: the heading.
      places: labels of the values; default: the epochs' numbers, thinned.
      place_name: the label of the axis.
    """
    drawn = [draw_panel(*panel, places, place_name) for panel in panels.items()]
    return html_page(title, *drawn, style=STYLE)


def draw_panel(
    metric: str,
    lines: Mapping[str, Sequence[float]],
    places: Sequence[str] = (),
    place_name: str = "epoch",
) -> str:
    """One panel of `draw_page`."""
    epochs = max(len(values) for values in lines.values())
    numbers: Sequence[int] = range(1, epochs + 1)
    if not places and epochs > MOST_TICKS:
        whole = {round(tick) for tick in ticks_between(1, epochs)}
        numbers = sorted(whole.intersection(numbers))
    ticks = [(n, places[n - 1] if places else str(n)) for n in numbers]
    points = {
        name: [(float(n), value) for n, value in enumerate(values, start=1)]
        for name, values in lines.items()
    }
    title = metric.replace("_", " ")
    return draw_chart(Chart(title, points, place_name, ticks, dots=True))
