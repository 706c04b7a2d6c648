"""Learning curves as one HTML page: lines in SVG, no script, no other file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfdp.tools.report.html_page import html_page
from tfdp.tools.report.line_chart import Chart, draw_chart, ticks_between

__all__ = ["STYLE", "draw_page", "draw_panel"]

_MOST_TICKS = 6

STYLE = "svg { margin: 0 12px 12px 0; }\n"


def draw_page(
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    title: str,
    places: Sequence[str] = (),
    place_name: str = "epoch",
) -> str:
    """The page with one panel for each metric.

    Args:
      panels: metric to line name to one value for each epoch, or place; a value that is
        not finite leaves a gap.
      title: the heading.
      places: what stands below the values, all of it; by default the epochs' numbers,
        not all where there are many.
      place_name: what stands below that.
    """
    drawn = [
        draw_panel(metric, lines, places, place_name)
        for metric, lines in panels.items()
    ]
    return html_page(title, *drawn, style=STYLE)


def draw_panel(
    metric: str,
    lines: Mapping[str, Sequence[float]],
    places: Sequence[str] = (),
    place_name: str = "epoch",
) -> str:
    """One of its panels; see `draw_page`."""
    epochs = max(len(values) for values in lines.values())
    ticks = range(1, epochs + 1) if places else _epoch_ticks(epochs)
    return draw_chart(
        Chart(
            metric.replace("_", " "),
            {
                name: [(float(n), value) for n, value in enumerate(values, start=1)]
                for name, values in lines.items()
            },
            place_name,
            [(n, places[n - 1] if places else str(n)) for n in ticks],
            dots=True,
        )
    )


def _epoch_ticks(epochs: int) -> list[int]:
    if epochs <= _MOST_TICKS:
        return list(range(1, epochs + 1))
    whole = {round(tick) for tick in ticks_between(1, epochs)}
    return sorted(tick for tick in whole if 1 <= tick <= epochs)
