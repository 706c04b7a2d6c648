"""Bars of parts, as wide as the page: no letter in them, so that none becomes small."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

__all__ = ["PART_BARS_STYLE", "part_bars"]

PART_BARS_STYLE = """\
.bar { max-width: 960px; margin: 8px 0; }
.bar svg { display: block; margin: 0; }
.bar .name { display: flex; justify-content: space-between; }
"""
_HEIGHT = 22
# In percent; narrower parts are not drawn.
_THINNEST = 0.05


def part_bars(
    bars: Sequence[tuple[str, str, Mapping[str, float]]],
    colours: Mapping[str, str],
    unit: str,
) -> str:
    """A bar for each row, all in one scale.

    Args:
      bars: what each is of, what stands at its end, and its parts, not below 0.
      colours: by part, in the order in which they are drawn.
      unit: of the parts, in what is shown where one points.
    """
    most = max([sum(parts.values()) for *_, parts in bars] + [1e-300])
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
        label = html.escape(name)
        drawn.append(
            f'<div class="bar"><div class="name"><span>{label}</span>'
            f"<span>{html.escape(end)}</span></div>\n"
            f'<svg width="100%" height="{_HEIGHT}" role="img" aria-label="{label}">'
            f"{''.join(boxes)}</svg></div>"
        )
    return "\n".join(drawn)
