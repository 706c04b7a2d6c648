"""A plan as one HTML page with pictures: bars in SVG, no script, no other file."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from tfdp.tools.report.html_page import (
    TABLE_STYLE,
    html_page,
    html_table,
    legend,
    svg_line,
    svg_text,
)

__all__ = ["draw_plan"]

# In the order in which they are drawn: what stays first, what comes and goes last.
COLOURS = {
    "weights": "#1f5fa8",
    "slots": "#7a4fa0",
    "state": "#555555",
    "batch": "#d9a521",
    "activations": "#9dbbdb",
    "gradients": "#c2571a",
    "exchange": "#2f7d4f",
    "update": "#b07aa1",
    "scratch": "#bbbbbb",
}
_WIDTH, _LEFT, _RIGHT, _BAR, _GAP, _TOP = 1000, 300, 110, 26, 12, 30
# Narrower parts are not drawn.
_THINNEST = 0.2

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]


def draw_plan(
    title: str,
    sentence: str,
    bars: Sequence[tuple[str, Mapping[str, int]]],
    tables: Sequence[Table],
    memory_bytes: int | None = None,
) -> str:
    """The page.

    Args:
      title: the heading.
      sentence: the answer in words.
      bars: what each one is of, and its parts in bytes.
      tables: (heading, titles of the columns, rows).
      memory_bytes: where a line is drawn; None: nowhere.
    """
    shown = {part for _, parts in bars for part in parts}
    return html_page(
        title,
        f"<p>{html.escape(sentence)}</p>",
        legend({part: colour for part, colour in COLOURS.items() if part in shown}),
        _picture(bars, memory_bytes),
        *(html_table(*table) for table in tables if table[2]),
        style=TABLE_STYLE,
    )


def _picture(
    bars: Sequence[tuple[str, Mapping[str, int]]], memory_bytes: int | None
) -> str:
    most = max([sum(parts.values()) for _, parts in bars] + [memory_bytes or 1])
    scale = (_WIDTH - _LEFT - _RIGHT) / max(most, 1)
    height = _TOP + len(bars) * (_BAR + _GAP) + 8
    lines = [
        f'<svg width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        'role="img" aria-label="memory by part">'
    ]
    for number, (name, parts) in enumerate(bars):
        y, x = _TOP + number * (_BAR + _GAP), float(_LEFT)
        lines.append(svg_text(_LEFT - 8, y + 17, name, "end"))
        for part, colour in COLOURS.items():
            size_bytes = parts.get(part, 0)
            if size_bytes * scale >= _THINNEST:
                lines.append(_box(x, y, size_bytes * scale, colour, part, size_bytes))
                x += size_bytes * scale
        total = sum(parts.values())
        lines.append(svg_text(x + 6, y + 17, f"{total / 1e6:,.0f} MB", "start"))
    if memory_bytes is not None:
        x = _LEFT + memory_bytes * scale
        lines.append(svg_line(x, 18, x, height - 4, "#a00", 2))
        lines.append(svg_text(x, 12, f"memory: {memory_bytes / 1e6:,.0f} MB", "middle"))
    return "\n".join([*lines, "</svg>"])


def _box(
    x: float, y: float, width: float, colour: str, part: str, size_bytes: int
) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" '
        f'fill="{colour}"><title>{part}: {size_bytes / 1e6:,.1f} MB</title></rect>'
    )
