"""The trials of `tfdp tune` as one HTML page."""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence

from tfdp.tools.report.html_page import html_page, legend, svg_line, svg_text
from tfdp.tools.tune.setting import Setting
from tfdp.tools.tune.tuning import Trial
from tfdp.tools.tune.words import changes_in_words

__all__ = ["draw_trials"]

COLOURS = {"the winner": "#2f7d4f", "the baseline": "#d9a521", "others": "#9dbbdb"}
_WIDTH, _LEFT, _RIGHT, _BAR, _GAP, _TOP = 1200, 620, 110, 22, 8, 10


def draw_trials(
    title: str, lines: Sequence[str], trials: Sequence[Trial], winner: Setting
) -> str:
    """The page: what is chosen, a bar for each trial, and the log.

    Args:
      title: the heading.
      lines: the explanation; the last ones are to be pasted.
      trials: the baseline first.
      winner: what is chosen.
    """
    said = "\n".join(html.escape(line) for line in lines)
    paste = "\n".join(html.escape(line) for line in winner.lines)
    return html_page(
        title,
        f"<pre><b>{paste}</b></pre>",
        legend(COLOURS),
        _picture(trials, winner),
        "<p>Bars: samples per second, in the rounds where there were any, else in the "
        "search. Black: from the slowest to the fastest round.</p>",
        f"<h2>Log</h2>\n<pre>{said}</pre>",
    )


def _picture(trials: Sequence[Trial], winner: Setting) -> str:
    ran = [trial for trial in trials if trial.speed is not None]
    most = max([max([t.speed or 0.0, *t.rounds]) for t in ran], default=1.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    height = _TOP + len(trials) * (_BAR + _GAP)
    lines = [
        f'<svg width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        'role="img" aria-label="samples per second by setting">'
    ]
    for number, trial in enumerate(trials):
        y = _TOP + number * (_BAR + _GAP)
        lines.append(
            svg_text(_LEFT - 8, y + 15, changes_in_words(trial.setting), "end")
        )
        if trial.speed is None:
            lines.append(svg_text(_LEFT + 4, y + 15, "failed", "start"))
            continue
        speed = statistics.median(trial.rounds) if trial.rounds else trial.speed
        kind = "the baseline" if trial is trials[0] else "others"
        colour = COLOURS["the winner" if trial.setting == winner else kind]
        lines.append(
            f'<rect x="{_LEFT}" y="{y}" width="{speed * scale:.1f}" height="{_BAR}" '
            f'fill="{colour}"/>'
        )
        if len(trial.rounds) > 1:
            ends = [
                _LEFT + each * scale for each in (min(trial.rounds), max(trial.rounds))
            ]
            lines.append(
                svg_line(ends[0], y + _BAR / 2, ends[1], y + _BAR / 2, "#000", 2)
            )
        x = _LEFT + max([speed, *trial.rounds]) * scale + 6
        lines.append(svg_text(x, y + 15, f"{speed:,.1f}", "start"))
    return "\n".join([*lines, "</svg>"])
