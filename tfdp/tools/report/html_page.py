"""The common frame of all pages: one HTML file with its pictures, without script."""

from __future__ import annotations

import html
from collections.abc import Sequence

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
img {{ max-width: 100%; height: auto; }}
@media (max-width: 500px) {{ body {{ margin: 12px; }} }}
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
