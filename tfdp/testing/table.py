"""A table of text: names to the left, figures to the right."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["format_table"]


def format_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of columns two spaces apart; the first and the last are flush left."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    last = len(widths) - 1
    lines = []
    for cells in (titles, *rows):
        padded = [
            cell.ljust(width) if index in (0, last) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
