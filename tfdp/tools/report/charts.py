"""Line charts and stacked bars as SVG, small enough for a phone."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence

from tfdp.tools.report.html_page import svg_line, svg_text

COLOURS = ("#1f5fa8", "#c2571a", "#2f7d4f", "#7a4fa0")
WIDTH, HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 36, 44
MOST_TICKS = 6
# Pixels per letter in the legend, an upper bound.
_LETTER = 7
_MOST_NAME = 24
# The chart's arithmetic fails outside this range.
_LEAST, _MOST = 1e-250, 1e250
# More points would overlap.
MOST_POINTS = 1000

Point = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Chart:
    """A line chart."""

    title: str  # cut at the width of the chart
    # Name -> points from left to right; a value that is not finite leaves a gap.
    lines: Mapping[str, Sequence[Point]]
    x_name: str
    # (x, label); None: round numbers
    x_ticks: Sequence[tuple[float, str]] | None = None
    marks: Sequence[tuple[float, str]] = ()  # (x, label) of vertical dashed lines
    from_zero: bool = False  # whether the y axis begins at 0
    dots: bool = False  # whether to mark each point


def ticks_between(low: float, high: float, most: int = MOST_TICKS) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) from `low` to `high`."""
    raw_step = (high - low) / most
    magnitude = 10.0 ** math.floor(math.log10(raw_step))
    step = next(s * magnitude for s in (1, 2, 5, 10) if s * magnitude >= raw_step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [multiple * step for multiple in range(first, last + 1)]


def draw_chart(chart: Chart) -> str:
    """Renders an `svg` element that shrinks with the page."""
    points = [point for line in chart.lines.values() for point in line]
    low, high = _range_of([y for _, y in points], chart.from_zero)
    places = [x for x, _ in points if _is_shown(x)] or [0.0]
    first, last = min(places), max(places)

    def x_of(x: float) -> float:
        share = (x - first) / (last - first) if last > first else 0.5
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y_of(value: float) -> float:
        return _TOP + (high - value) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    bottom = HEIGHT - _BOTTOM
    names = [*chart.lines] if len(chart.lines) > 1 else []
    title = _cut(chart.title, int((WIDTH - _LEFT) / _LETTER))
    parts = [
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{html.escape(chart.title)} over: '
        f'{html.escape(chart.x_name)}">',
        svg_text(_LEFT, 12, title, "start"),
        svg_text(WIDTH / 2, HEIGHT - 8, chart.x_name, "middle"),
    ]
    for value in ticks_between(low, high):
        parts.append(svg_line(_LEFT, y_of(value), WIDTH - _RIGHT, y_of(value), "#ddd"))
        parts.append(svg_text(_LEFT - 6, y_of(value) + 4, _figure(value), "end"))
    ticks = chart.x_ticks
    if ticks is None:
        rounded = ticks_between(first, last) if first < last else [first]
        ticks = [(tick, _figure(tick)) for tick in rounded]
    for x, words in ticks:
        parts.append(svg_text(x_of(x), HEIGHT - 26, words, "middle"))
    parts.append(svg_line(_LEFT, _TOP, _LEFT, bottom, "#888"))
    parts.append(svg_line(_LEFT, bottom, WIDTH - _RIGHT, bottom, "#888"))
    for x, words in chart.marks:
        if first <= x <= last:
            parts.append(
                f'<line x1="{x_of(x):.1f}" y1="{_TOP}" x2="{x_of(x):.1f}" '
                f'y2="{bottom}" stroke="#a00" stroke-dasharray="4 3">'
                f"<title>{html.escape(words)}</title></line>"
            )
    for number, line in enumerate(chart.lines.values()):
        placed = [
            (x_of(x), y_of(y)) if _is_shown(x) and _is_shown(y) else None
            for x, y in line
        ]
        parts.extend(_curve(placed, COLOURS[number % len(COLOURS)], chart.dots))
    return "\n".join([*parts, *_legend(names), "</svg>"])


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


def _range_of(values: Sequence[float], from_zero: bool) -> Point:
    shown = [value for value in values if _is_shown(value)] or [0.0]
    low, high = min(shown), max(shown)
    if from_zero and low >= 0 and high > _LEAST:
        return 0.0, 1.05 * high
    margin = 0.05 * (high - low) or 0.05 * abs(high)
    margin = margin if margin > _LEAST else 1.0
    return low - margin, high + margin


def _is_shown(value: float) -> bool:
    """Whether the chart has a place for it: finite, and not too large."""
    return abs(value) < _MOST


def _figure(value: float) -> str:
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"


def _legend(names: Sequence[str]) -> list[str]:
    """The legend at the right, below the title."""
    names = [_cut(name, _MOST_NAME) for name in names]
    widths = [max(90, 28 + _LETTER * len(name)) for name in names]
    left = WIDTH - _RIGHT - sum(widths)
    parts = []
    for number, (name, width) in enumerate(zip(names, widths, strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(svg_line(left, 25, left + 16, 25, colour, 2))
        parts.append(svg_text(left + 20, 29, name, "start"))
        left += width
    return parts


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: max(most - 1, 0)]}…"


def _curve(points: Sequence[Point | None], colour: str, dots: bool) -> list[str]:
    path = []
    previous = None
    for point in points:
        if point is not None:
            letter = "M" if previous is None else "L"
            path.append(f"{letter}{point[0]:.1f} {point[1]:.1f}")
        previous = point
    there = [point for point in points if point is not None]
    # A single point makes no line.
    dots = dots or len(there) == 1
    return [
        f'<path d="{" ".join(path)}" fill="none" stroke="{colour}" stroke-width="2"/>',
        *(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>'
            for x, y in (there if dots else ())
        ),
    ]


# Stacked bars as wide as the page; text outside of the SVG does not shrink with it.


PART_BARS_STYLE = """\
.bar { max-width: 960px; margin: 8px 0; }
.bar svg { display: block; margin: 0; }
.bar .name { display: flex; justify-content: space-between; }
"""
_HEIGHT = 22
# In percent; narrower parts are omitted, and lines end before the edge.
_THINNEST, _LAST = 0.05, 99.7
LIMIT_COLOUR = "#a00"


def part_bars(
    bars: Sequence[tuple[str, str, Mapping[str, float]]],
    colours: Mapping[str, str],
    unit: str,
    *,
    limit: float | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> str:
    """Stacked bars in one scale.

    Args:
      bars: (label, text at the end, part -> value of at least 0) for each.
      colours: by part, in drawing order.
      unit: of the values, for the tooltip.
      limit: where every bar has a line of LIMIT_COLOUR across it.
      ranges: label -> (from, to) of a black line along the bar.
    """
    ranges = ranges or {}
    ends = [sum(parts.values()) for *_, parts in bars]
    most = max([*ends, *(to for _, to in ranges.values()), limit or 0.0, 1e-300])
    drawn = []
    for name, end, parts in bars:
        place, boxes = 0.0, []
        for part, colour in colours.items():
            width = 100 * parts.get(part, 0.0) / most
            if width >= _THINNEST:
                words = html.escape(f"{part}: {parts[part]:.4g} {unit}")
                boxes.append(
                    f'<rect x="{place:.3f}%" width="{width:.3f}%" height="{_HEIGHT}" '
                    f'fill="{colour}"><title>{words}</title></rect>'
                )
            place += width
        if name in ranges:
            low, high = (100 * value / most for value in ranges[name])
            size = f'width="{high - low:.3f}%" height="2"'
            boxes.append(f'<rect x="{low:.3f}%" y="{_HEIGHT // 2}" {size}/>')
        if limit is not None:
            x = min(100 * limit / most, _LAST)
            size = f'width="2" height="{_HEIGHT}"'
            boxes.append(f'<rect x="{x:.3f}%" {size} fill="{LIMIT_COLOUR}"/>')
        label = html.escape(name)
        drawn.append(
            f'<div class="bar"><div class="name"><span>{label}</span>'
            f"<span>{html.escape(end)}</span></div>\n"
            f'<svg width="100%" height="{_HEIGHT}" role="img" aria-label="{label}">'
            f"{''.join(boxes)}</svg></div>"
        )
    return "\n".join(drawn)
