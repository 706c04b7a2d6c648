"""The common frame of all pages: one HTML file with SVG, without script."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

#: For a page with tables.
TABLE_STYLE = """\
td, th { text-align: right; padding: 3px 12px; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 14px sans-serif; margin: 24px; color: #222; background: #fff; }}
h1, p {{ overflow-wrap: anywhere; }}
pre, .scrolls {{ overflow-x: auto; }}
svg[viewBox] {{ max-width: 100%; height: auto; }}
.scrolls svg {{ max-width: none; }}
@media (max-width: 500px) {{ body {{ margin: 12px; }} }}
svg text {{ font: 12px sans-serif; fill: #222; }}
{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def html_page(title: str, *parts: str, style: str = "") -> str:
    """Renders a page: `title` is plain text, `parts` HTML, `style` further CSS."""
    return _PAGE.format(title=html.escape(title), body="\n".join(parts), style=style)


def scrolls(part: str) -> str:
    """A part that scrolls sideways where the page is narrower."""
    return f'<div class="scrolls">\n{part}\n</div>'


def legend(colours: Mapping[str, str]) -> str:
    """A paragraph that names each colour."""
    entries = [
        f'<span style="white-space: nowrap"><span style="color: {colour}">&#9632;'
        f"</span> {name}</span>"
        for name, colour in colours.items()
    ]
    return f"<p>{' &nbsp; '.join(entries)}</p>"


def html_table(
    heading: str, titles: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    """A table below a heading; all arguments are plain text."""

    def line(cells: Sequence[str], tag: str) -> str:
        inner = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
        return f"<tr>{inner}</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    table = scrolls(f"<table>\n{line(titles, 'th')}\n{body}\n</table>")
    return f"<h2>{html.escape(heading)}</h2>\n{table}"


def svg_line(
    x1: float, y1: float, x2: float, y2: float, colour: str, width: int = 1
) -> str:
    """A straight line; all lengths in pixels."""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{colour}" stroke-width="{width}"/>'
    )


def svg_text(x: float, y: float, content: str, anchor: str) -> str:
    """Plain text at a place; `anchor` is start, middle or end."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{html.escape(content)}</text>"
    )
