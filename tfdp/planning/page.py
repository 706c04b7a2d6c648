"""A plan as one HTML page with pictures: bars in SVG, no script, no other file."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

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

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 14px sans-serif; margin: 24px; color: #222; background: #fff; }}
svg text {{ font: 12px sans-serif; fill: #222; }}
td, th {{ text-align: right; padding: 3px 12px; border-bottom: 1px solid #ddd; }}
td:first-child, th:first-child {{ text-align: left; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{sentence}</p>
<p>{legend}</p>
{picture}
{tables}
</body>
</html>
"""

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
    return _PAGE.format(
        title=html.escape(title),
        sentence=html.escape(sentence),
        legend=_legend({part for _, parts in bars for part in parts}),
        picture=_picture(bars, memory_bytes),
        tables="\n".join(_table(*table) for table in tables if table[2]),
    )


def _legend(parts: set[str]) -> str:
    return " &nbsp; ".join(
        f'<span style="color: {colour}">&#9632;</span> {part}'
        for part, colour in COLOURS.items()
        if part in parts
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
        lines.append(_text(_LEFT - 8, y + 17, name, "end"))
        for part, colour in COLOURS.items():
            size_bytes = parts.get(part, 0)
            if size_bytes * scale >= _THINNEST:
                lines.append(_box(x, y, size_bytes * scale, colour, part, size_bytes))
                x += size_bytes * scale
        total = sum(parts.values())
        lines.append(_text(x + 6, y + 17, f"{total / 1e6:,.0f} MB", "start"))
    if memory_bytes is not None:
        x = _LEFT + memory_bytes * scale
        lines.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="18" y2="{height - 4}" '
            'stroke="#a00" stroke-width="2"/>'
        )
        lines.append(_text(x, 12, f"memory: {memory_bytes / 1e6:,.0f} MB", "middle"))
    return "\n".join([*lines, "</svg>"])


def _box(
    x: float, y: float, width: float, colour: str, part: str, size_bytes: int
) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" '
        f'fill="{colour}"><title>{part}: {size_bytes / 1e6:,.1f} MB</title></rect>'
    )


def _text(x: float, y: float, content: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{html.escape(content)}</text>"
    )


def _table(heading: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        inner = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
        return f"<tr>{inner}</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    head = f"<h2>{html.escape(heading)}</h2>\n<table>\n{line(titles, 'th')}"
    return f"{head}\n{body}\n</table>"
