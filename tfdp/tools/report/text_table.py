"""A table of text for the terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["format_table"]


def format_table(
    rows: Sequence[Sequence[str]], left: Collection[int] | None = None
) -> str:
    """Lines of columns two spaces apart.

    Args:
      rows: of one length; mostly the first one holds the titles.
      left: places of the columns that are flush left; None: all are. Others are flush
        right.

    >>> print(format_table([("model", "ms"), ("cnn", "12")], left=[0]))
    model  ms
    cnn    12
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for cells in rows:
        padded = [
            cell.ljust(width) if left is None or place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
