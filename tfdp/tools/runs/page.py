"""Renders a run as one HTML page: with its pictures, no script, no other file."""

from __future__ import annotations

import html
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence

from tfdp.tools.report.html_page import TABLE_STYLE, html_page, html_table
from tfdp.tools.report.text import format_bytes, format_seconds
from tfdp.tools.runs import in_words, pictures
from tfdp.tools.runs.facts import RunFacts

STYLE = (
    TABLE_STYLE
    + """\
body { max-width: 1400px; margin: 20px; }
h2 { margin: 28px 0 8px; font-size: 19px; }
table { border-collapse: collapse; }
.pictures { display: flex; flex-wrap: wrap; gap: 12px 0; }
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


def draw_run(facts: RunFacts, title: str, folder: str = ".") -> str:
    """The page of a run; `folder`: the run's directory, relative to the page."""
    rates = pictures.rate_pictures(facts)
    sizes = pictures.size_pictures(facts)
    learning = pictures.learning_pictures(facts)
    parts = [
        f"<p>{html.escape(in_words.headline(facts))}</p>",
        f'<p class="next"><b>Next:</b> {html.escape(in_words.advice(facts))}</p>',
        *_notes(facts),
        _text_table("In short", in_words.figures(facts)),
        *_section("Throughput", _row(rates)),
        "<h2>Where the time went</h2>",
        "<p>Of each worker, without the step in which TensorFlow traces. Other threads "
        "may compute during an exchange; a trace of single steps shows how much.</p>",
        pictures.part_picture(facts),
        "<h2>Stragglers</h2>",
        *_stragglers(facts),
        *_traces(facts, folder),
        *_section("Memory, and what is sent", _row(sizes)),
        *_section("Learning", _row(learning)),
        *_tables(facts),
    ]
    return html_page(title, *parts, style=STYLE)


def draw_comparison(runs: Sequence[tuple[str, RunFacts]], title: str) -> str:
    """The page that compares runs, given as (unique name, figures)."""
    titles, *rows = in_words.side_by_side(runs)
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


def _text_table(heading: str, rows: Sequence[tuple[str, str]]) -> str:
    return f'<div class="wide words">{html_table(heading, ("", ""), rows)}</div>'


def _items(texts: Sequence[str]) -> str:
    return "".join(f"<li>{html.escape(text)}</li>" for text in texts)


def _notes(facts: RunFacts) -> Iterator[str]:
    if facts.notes:
        yield f"<h2>Missing or damaged</h2>\n<ul>{_items(facts.notes)}</ul>"


def _stragglers(facts: RunFacts) -> Iterator[str]:
    stragglers = facts.stragglers
    if named := in_words.said_while_training(facts)[-MOST_STRAGGLERS:]:
        yield f"<p>While it trained:</p><ul>{_items(named)}</ul>"
    if stragglers.unknown:
        yield f"<p>{html.escape(stragglers.unknown)}</p>"
        return
    found = [*map(in_words.describe_straggler, stragglers.found[:MOST_STRAGGLERS])]
    found = found or ["No worker held up the others by more than 5% of a step."]
    yield f"<ul>{_items(found)}</ul>"
    yield (
        "<p>The others wait for the worker that waits least. Only a trace shows the "
        "replicas of one host, and several delays within a step.</p>"
    )
    yield pictures.wait_picture(facts)


def _traces(facts: RunFacts, folder: str) -> Iterator[str]:
    if not facts.traces:
        return
    yield "<h2>Single steps, by replica</h2>"
    for trace in facts.traces:
        path = urllib.parse.quote(f"{folder}/{trace.name}")
        name = html.escape(trace.name)
        yield (
            f'<p><a href="{html.escape(path)}">{name}</a>: every op on every thread, '
            f"for {PERFETTO}.</p>"
        )
        yield pictures.trace_picture(trace.replicas)


def _tables(facts: RunFacts) -> Iterator[str]:
    last = facts.run.sessions[-1]
    yield _text_table("Settings", list(last.first.start.settings.items()))
    yield _text_table("Versions", list(last.first.start.versions.items()))
    columns: dict[str, Mapping[int, float]] = {
        "memory at most": facts.most("peak_bytes"),
        "sent within hosts": facts.per_step("within_bytes"),
        "sent between hosts": facts.per_step("between_bytes"),
    }
    rows = []
    for rank, worker in list(last.workers.items())[:MOST_WORKERS]:
        machine = worker.start.machine
        found = [column.get(rank) for column in columns.values()]
        sizes = ["-" if size is None else format_bytes(size) for size in found]
        words = [machine.get(name) or "-" for name in ("processor", "usable_cores")]
        rows.append([f"{rank}", worker.start.host, *words, *sizes])
    titles = ["worker", "host", "processor", "cores", *columns]
    yield f'<div class="wide">{html_table("Workers", titles, rows)}</div>'
    yield _starts(facts)


def _starts(facts: RunFacts) -> str:
    rows = []
    for number, start in enumerate(facts.starts[:MOST_STARTS]):
        began = facts.run.sessions[number].first.start.began_seconds
        rows.append(
            [
                _date(began),
                format_seconds(start.to_seconds - start.from_seconds),
                f"{start.workers}",
                "-" if start.first_step is None else f"{start.first_step:,}",
                f"{start.steps:,}",
                "normally" if start.has_ended else "no end was written",
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
