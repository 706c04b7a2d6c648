"""Line charts and stacked bars by matplotlib, as pictures within an HTML page."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import html
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfdp.errors import MissingDependencyError

CHART_INCHES = 4.8, 3.1
BARS_INCHES, BAR_INCHES, LEGEND_INCHES = 9.5, 0.45, 1.0
MOST_DOTS = 40
# Longer names would widen the picture.
MOST_LETTERS = 100
# matplotlib's arithmetic fails beyond this.
MOST = 1e250
# More points would overlap.
MOST_POINTS = 1000
LIMIT_COLOUR = "#a00"
# Names may hold dollar signs, and readers may search the text of a picture.
SETTINGS = {"text.parse_math": False, "svg.fonttype": "none", "font.size": 9}

Point = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Chart:
    """A line chart."""

    title: str
    # Name -> points from left to right; a value that is not finite leaves a gap. Names
    # of places are evenly spaced.
    lines: Mapping[str, Sequence[tuple[float | str, float]]]
    x_name: str
    restarts: Sequence[float] = ()  # x of vertical dashed lines
    from_zero: bool = False  # whether the y axis begins at 0


def require_matplotlib() -> None:
    """Raises a MissingDependencyError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingDependencyError(
            "Charts are drawn by matplotlib, which is not installed: pip install "
            "'tfdp[plots]'."
        ) from None


@contextlib.contextmanager
def new_figure(width_inches: float, height_inches: float) -> Iterator[Any]:
    """An empty matplotlib figure; raises a MissingDependencyError."""
    require_matplotlib()
    # Without pyplot, which picks a window system and keeps the figure alive.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(SETTINGS):
        yield Figure(figsize=(width_inches, height_inches))


def draw_chart(chart: Chart) -> str:
    """Draws a line chart as an `img` element."""
    names = ", ".join(name for name in chart.lines if name)
    words = f"Line chart of {chart.title} over {chart.x_name}"
    words += f" of {names}" if names else ""
    words += "; dashed: the training started again" if chart.restarts else ""
    with new_figure(*CHART_INCHES) as figure:
        plot_lines(figure.subplots(), chart)
        return _picture(figure, chart.title, words)


def plot_lines(axis: Any, chart: Chart) -> None:
    """Plots the lines of a chart on a matplotlib axis."""
    from matplotlib.ticker import MaxNLocator

    for points in chart.lines.values():
        # A single point makes no line.
        marker = "." if len(points) <= MOST_DOTS else None
        values = [y if abs(y) < MOST else math.nan for _, y in points]
        axis.plot([x for x, _ in points], values, marker=marker)
    names, drawn = [_cut(name) for name in chart.lines], axis.get_lines()
    places = [x for points in chart.lines.values() for x, _ in points]
    if all(isinstance(x, int) for x in places):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    for x in chart.restarts:
        axis.axvline(x, color=LIMIT_COLOUR, linestyle="--", linewidth=1)
    if chart.from_zero:
        axis.axhline(0, linewidth=0)
        axis.set_ylim(bottom=0)
    if len(chart.lines) > 1:
        axis.legend(drawn[: len(names)], names)
    axis.set_title(_cut(chart.title))
    axis.set_xlabel(chart.x_name)
    axis.grid(alpha=0.3)


def draw_bars(
    title: str,
    bars: Sequence[tuple[str, str, Mapping[str, float]]],
    colours: Mapping[str, str],
    unit: str,
    *,
    limit: tuple[str, float] | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> str:
    """Draws stacked bars in one scale as an `img` element.

    Args:
      title: of the picture.
      bars: (name, further text, part -> value of at least 0) for each.
      colours: by part, in drawing order.
      unit: of the values.
      limit: the name and the value of a line of LIMIT_COLOUR across all bars.
      ranges: name -> (from, to) of a black line along the bar.
    """
    ranges = ranges or {}
    with new_figure(BARS_INCHES, LEGEND_INCHES + BAR_INCHES * len(bars)) as figure:
        axis = figure.subplots()
        ends = [0.0] * len(bars)
        for part, colour in colours.items():
            widths = [parts.get(part, 0.0) for *_, parts in bars]
            places = range(len(bars))
            axis.barh(places, widths, 0.5, ends, color=colour, label=part)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        for place, (name, text, _) in enumerate(bars):
            axis.text(0.0, place - 0.3, f"{_cut(name)}: {text}")
            if name in ranges:
                axis.plot(ranges[name], [place, place], color="black")
        if limit is not None:
            axis.axvline(limit[1], color=LIMIT_COLOUR, label=limit[0])
        axis.set_xlim(left=0)
        axis.set_ylim(len(bars) - 0.5, -0.8)
        axis.set_yticks([])
        axis.set_xlabel(unit)
        axis.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4)
        words = [title] if limit is None else [title, limit[0]]
        for name, text, parts in bars:
            of = (f"{part} {each:.4g} {unit}" for part, each in parts.items())
            words.append(f"{name}, {text}: {', '.join(of)}")
        return _picture(figure, title, "; ".join(words))


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Thins points to at most `most`: means of consecutive values."""
    if len(points) <= most:
        return list(points)
    width = math.ceil(len(points) / most)
    found = []
    for start in range(0, len(points), width):
        part = points[start : start + width]
        found.append((part[-1][0], math.fsum(y for _, y in part) / len(part)))
    return found


def _picture(figure: Any, title: str, words: str) -> str:
    """The figure as SVG within an `img` element; `words` for who cannot see it."""
    file = io.BytesIO()
    metadata = {"Title": title, "Date": None}
    figure.savefig(file, format="svg", bbox_inches="tight", metadata=metadata)
    source = base64.b64encode(file.getvalue()).decode()
    return (
        f'<img title="{html.escape(title)}" alt="{html.escape(words)}" '
        f'src="data:image/svg+xml;base64,{source}">'
    )


def _cut(text: str) -> str:
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…"
