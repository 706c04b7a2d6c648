"""Learning curves as one HTML page: lines in SVG, no script, no other file."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from tfdp.report.html_page import html_page, svg_line, svg_text

__all__ = ["draw_page"]

_WIDTH, _HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 36, 44
_COLOURS = ("#1f5fa8", "#c2571a", "#2f7d4f", "#7a4fa0")
_MOST_TICKS = 6

_STYLE = "svg { margin: 0 12px 12px 0; }\n"


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
        _panel(metric, lines, places, place_name) for metric, lines in panels.items()
    ]
    return html_page(title, *drawn, style=_STYLE)


def ticks_between(low: float, high: float, most: int = _MOST_TICKS) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) from `low` to `high`."""
    raw_step = (high - low) / most
    magnitude = 10.0 ** math.floor(math.log10(raw_step))
    step = next(s * magnitude for s in (1, 2, 5, 10) if s * magnitude >= raw_step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [multiple * step for multiple in range(first, last + 1)]


def _range_of(values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def _panel(
    metric: str,
    lines: Mapping[str, Sequence[float]],
    places: Sequence[str],
    place_name: str,
) -> str:
    epochs = max(len(values) for values in lines.values())
    low, high = _range_of([value for values in lines.values() for value in values])

    def x_of(epoch: float) -> float:
        share = (epoch - 1) / (epochs - 1) if epochs > 1 else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y_of(value: float) -> float:
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{html.escape(metric)} over: {html.escape(place_name)}">',
        svg_text(_LEFT, 20, metric.replace("_", " "), "start"),
        svg_text(_WIDTH / 2, _HEIGHT - 8, place_name, "middle"),
    ]
    for value in ticks_between(low, high):
        parts.append(svg_line(_LEFT, y_of(value), _WIDTH - _RIGHT, y_of(value), "#ddd"))
        parts.append(svg_text(_LEFT - 6, y_of(value) + 4, f"{value:.4g}", "end"))
    for epoch in range(1, epochs + 1) if places else _epoch_ticks(epochs):
        place = places[epoch - 1] if places else str(epoch)
        parts.append(svg_text(x_of(epoch), _HEIGHT - 26, place, "middle"))
    parts.append(svg_line(_LEFT, _TOP, _LEFT, _HEIGHT - _BOTTOM, "#888"))
    bottom = _HEIGHT - _BOTTOM
    parts.append(svg_line(_LEFT, bottom, _WIDTH - _RIGHT, bottom, "#888"))
    for number, (name, values) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [
            (x_of(epoch), y_of(value)) if math.isfinite(value) else None
            for epoch, value in enumerate(values, start=1)
        ]
        parts.extend(_curve(points, colour))
        if len(lines) > 1:
            legend_x = _WIDTH - _RIGHT - 90 * (len(lines) - number)
            parts.append(svg_line(legend_x, 28, legend_x + 16, 28, colour, 2))
            parts.append(svg_text(legend_x + 20, 32, name, "start"))
    return "\n".join([*parts, "</svg>"])


def _epoch_ticks(epochs: int) -> list[int]:
    if epochs <= _MOST_TICKS:
        return list(range(1, epochs + 1))
    whole = {round(tick) for tick in ticks_between(1, epochs)}
    return sorted(tick for tick in whole if 1 <= tick <= epochs)


def _curve(points: Sequence[tuple[float, float] | None], colour: str) -> list[str]:
    path = []
    previous = None
    for point in points:
        if point is not None:
            letter = "M" if previous is None else "L"
            path.append(f"{letter}{point[0]:.1f} {point[1]:.1f}")
        previous = point
    dots = [
        f'<circle cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="2.5" fill="{colour}"/>'
        for point in points
        if point is not None
    ]
    drawn = f'<path d="{" ".join(path)}" fill="none" stroke="{colour}"'
    return [f'{drawn} stroke-width="2"/>', *dots]
