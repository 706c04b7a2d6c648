"""Text tables, durations and sizes."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def format_table(
    rows: Sequence[Sequence[str]], left: Collection[int] | None = None
) -> str:
    """Lines of columns two spaces apart.

    Args:
      rows: of equal length; usually the first one holds the titles.
      left: indices of the left-aligned columns; None: all. Others are right-aligned.

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


_SIZES = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def format_seconds(seconds: float) -> str:
    """A duration in at most two units.

    >>> [format_seconds(s) for s in (0.0394, 5.21, 250, 7500, 200_000)]
    ['39.4 ms', '5.21 s', '4 min 10 s', '2 h 5 min', '2 d 7 h']
    """
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.5:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    size, name, smaller, smaller_name = next(s for s in _SIZES if whole >= s[0])
    rest = whole % size // smaller
    return f"{whole // size:,} {name}" + (f" {rest} {smaller_name}" if rest else "")


def format_bytes(size_bytes: float) -> str:
    """A size in powers of a thousand.

    >>> [format_bytes(n) for n in (40, 16_640, 1_234_567_890)]
    ['40 B', '16.6 kB', '1.23 GB']
    """
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if size_bytes >= 10**power:
            return f"{size_bytes / 10**power:,.3g} {unit}"
    return f"{size_bytes:.3g} B"
