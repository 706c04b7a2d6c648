"""A run as one HTML page: pictures in SVG, no script, no other file."""

from __future__ import annotations

import html
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence

from tfdp.tools.report.charts import PART_BARS_STYLE
from tfdp.tools.report.html_page import TABLE_STYLE, html_page, html_table
from tfdp.tools.report.text import bytes_in_words, seconds_in_words
from tfdp.tools.runs import pictures
from tfdp.tools.runs.facts import Facts
from tfdp.tools.runs.in_words import (
    advice,
    figures,
    headline,
    side_by_side,
    straggler_in_words,
)

STYLE = (
    TABLE_STYLE
    + PART_BARS_STYLE
    + """\
body { max-width: 1400px; margin: 20px; }
h2 { margin: 28px 0 8px; font-size: 19px; }
table { border-collapse: collapse; }
.pictures { display: flex; flex-wrap: wrap; gap: 12px 0; }
.pictures svg { max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
.wide:not(.words) td { white-space: nowrap; }
.words td, .words th { text-align: left; vertical-align: top; }
.words td { overflow-wrap: anywhere; max-width: 900px; }
.words td:first-child { white-space: nowrap; }
.words th:empty { display: none; }
.next { font-size: 17px; }
"""
)
MOST_WORKERS, MOST_STARTS, MOST_STRAGGLERS = 64, 50, 8
PERFETTO = "ui.perfetto.dev"


def draw_run(facts: Facts, title: str, folder: str = ".") -> str:
    """The page of a run.

    Args:
      facts: of it.
      title: the heading.
      folder: of the run, as seen from where the page lies.
    """
    rates = pictures.rate_pictures(facts)
    sizes = [*pictures.memory_pictures(facts), *pictures.bytes_pictures(facts)]
    learning = pictures.learning_pictures(facts)
    parts = [
        f"<p>{html.escape(headline(facts))}</p>",
        f'<p class="next"><b>Next:</b> {html.escape(advice(facts))}</p>',
        *_notes(facts),
        _words("In short", figures(facts)),
        *_section("Throughput", _row(rates)),
        "<h2>Where the time went</h2>",
        "<p>Of each worker, without the step in which TensorFlow traces. While "
        "something is exchanged other threads may compute; how much hides behind "
        "computing a trace of single steps tells.</p>",
        pictures.part_picture(facts),
        "<h2>Who was slow</h2>",
        *_stragglers(facts),
        *_traces(facts, folder),
        *_section("Memory, and what is sent", _row(sizes)),
        *_section("Learning", _row(learning)),
        *_tables(facts),
    ]
    return html_page(title, *parts, style=STYLE)


def draw_comparison(runs: Sequence[tuple[str, Facts]], title: str) -> str:
    """The page of several runs side by side.

    Args:
      runs: their names, each once, and what they were.
      title: the heading.
    """
    titles, *rows = side_by_side(runs)
    return html_page(
        title,
        f'<div class="wide words">{html_table("Side by side", titles, rows)}</div>',
        "<h2>Where the time of a step went</h2>",
        pictures.compared_bars(runs),
        *_section("Throughput and learning", _row(pictures.compared_pictures(runs))),
        style=STYLE,
    )


def _row(drawn: Sequence[str]) -> str:
    return f'<div class="pictures">{"".join(drawn)}</div>' if drawn else ""


def _section(heading: str, content: str) -> list[str]:
    return [f"<h2>{heading}</h2>", content] if content else []


def _words(heading: str, rows: Sequence[tuple[str, str]]) -> str:
    return f'<div class="wide words">{html_table(heading, ("", ""), rows)}</div>'


def _notes(facts: Facts) -> Iterator[str]:
    if facts.notes:
        listed = "".join(f"<li>{html.escape(note)}</li>" for note in facts.notes)
        yield f"<h2>Missing or damaged</h2>\n<ul>{listed}</ul>"


def _stragglers(facts: Facts) -> Iterator[str]:
    stragglers = facts.stragglers
    if stragglers.unknown:
        yield f"<p>{html.escape(stragglers.unknown)}</p>"
        return
    found = [*map(straggler_in_words, stragglers.found[:MOST_STRAGGLERS])]
    said = found or ["No worker held up the others by more than 5% of a step."]
    listed = "".join(f"<li>{html.escape(each)}</li>" for each in said)
    yield f"<ul>{listed}</ul>"
    yield (
        "<p>Who waits least is the one that others wait for. Replicas of one host are "
        "told apart by a trace only, and so is who is late within a step more than "
        "once.</p>"
    )
    yield pictures.wait_picture(facts)


def _traces(facts: Facts, folder: str) -> Iterator[str]:
    if not facts.traces:
        return
    yield "<h2>Single steps, by replica</h2>"
    for trace in facts.traces:
        path = urllib.parse.quote(f"{folder}/{trace.name}")
        name = html.escape(trace.name)
        yield (
            f'<p><a href="{html.escape(path)}">{name}</a>, which {PERFETTO} opens: '
            "every op on every thread.</p>"
        )
        yield pictures.trace_picture(trace.replicas)


def _tables(facts: Facts) -> Iterator[str]:
    last = facts.run.sessions[-1]
    yield _words("Settings", list(last.first.start.settings.items()))
    yield _words("Versions", list(last.first.start.versions.items()))
    columns: dict[str, Mapping[int, float]] = {
        "memory at most": facts.most("peak_bytes"),
        "sent within hosts": facts.per_step("within_bytes"),
        "sent between hosts": facts.per_step("between_bytes"),
    }
    rows = []
    for rank, worker in list(last.workers.items())[:MOST_WORKERS]:
        machine = worker.start.machine
        found = [column.get(rank) for column in columns.values()]
        sizes = ["-" if size is None else bytes_in_words(size) for size in found]
        cores, processor = machine.get("usable_cores", "-"), machine.get("processor")
        words = [worker.start.host, processor or "-", cores]
        rows.append([f"{rank}", *words, *sizes])
    titles = ["worker", "host", "processor", "cores", *columns]
    yield f'<div class="wide">{html_table("Workers", titles, rows)}</div>'
    yield _starts(facts)


def _starts(facts: Facts) -> str:
    rows = []
    for number, start in enumerate(facts.starts[:MOST_STARTS]):
        began = facts.run.sessions[number].first.start.began_seconds
        rows.append(
            [
                _date(began),
                seconds_in_words(start.to_seconds - start.from_seconds),
                f"{start.workers}",
                "-" if start.first_step is None else f"{start.first_step:,}",
                f"{start.steps:,}",
                "as it should" if start.has_ended else "no end was written",
                "-" if start.lost_steps is None else f"{start.lost_steps:,}",
            ]
        )
    titles = ["began", "lasted", "workers", "steps before", "steps", "ended"]
    table = html_table("Starts", [*titles, "steps made again"], rows)
    return f'<div class="wide">{table}</div>'


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, OSError, ValueError):
        return "-"
