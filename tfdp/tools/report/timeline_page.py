"""Renders a training step: lanes of each replica, a box for each op."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tfdp.tools.report.charts import ticks_between
from tfdp.tools.report.html_page import html_page, legend, scrolls, svg_line, svg_text

if TYPE_CHECKING:
    from tfdp._private.step_trace import TraceEvent

# Part of an op's name -> kind.
EXCHANGES = {
    "tfdp_all_gather": "gather of weights",
    "tfdp_reduce_scatter": "scatter of gradients",
    "tfdp_all_reduce": "sum of gradients",
}
UPDATE = "update of weights"
COLOURS = {
    "gather of weights": "#c2571a",
    "scatter of gradients": "#2f7d4f",
    "sum of gradients": "#7a4fa0",
    UPDATE: "#d9a521",
    "computing": "#9dbbdb",
}
_WIDTH, _LANE, _GAP, _LEFT, _TOP = 1120, 26, 8, 130, 30
_MOST_TICKS = 10
# Boxes narrower than this, in pixels, are omitted.
_THINNEST = 0.02
# TensorFlow's name scope of all replicas but the first.
REPLICA = re.compile(r"(?:^|/)replica_(\d+)/")
# Ops outside of the step belong to the input pipeline.
STEP = re.compile(r"PartitionedCall/")


def kind_of(name: str, optimizers: Iterable[str] = ()) -> str:
    """The kind of an op, by its name and the optimizers' names."""
    for part, kind in EXCHANGES.items():
        if part in name:
            return kind
    # TensorFlow numbers equal scopes. In a function shared by replicas the optimizer's
    # scope comes first.
    is_update = any(
        re.search(rf"(?:^|/){re.escape(optimizer)}(_\d+)?/", name)
        for optimizer in optimizers
    )
    return UPDATE if is_update else "computing"


def replica_of(name: str, first_rank: int = 0) -> int | None:
    """The rank of the replica that ran an op; None: the input pipeline.

    Shared ops of the step count for the first replica: neither has a scope.

    >>> replica_of("StatefulPartitionedCall/replica_1/dense/MatMul:MatMul", 2)
    3
    """
    if found := REPLICA.search(name):
        return first_rank + int(found[1])
    return first_rank if STEP.search(name) else None


def seconds_by_kind(
    events: Iterable[TraceEvent], optimizers: Sequence[str]
) -> dict[str, float]:
    """Total duration of the ops of each kind, on all threads."""
    seconds = dict.fromkeys(COLOURS, 0.0)
    for event in events:
        seconds[kind_of(event.name, optimizers)] += event.duration_us / 1e6
    return seconds


def hidden_share(events: Sequence[TraceEvent]) -> float | None:
    """The share of the exchange time in which another thread computed, if any."""
    exchanges = frozenset(EXCHANGES.values())
    computing = [e for e in events if kind_of(e.name) not in exchanges]
    total = hidden = 0.0
    for exchange in events:
        if kind_of(exchange.name) not in exchanges:
            continue
        start, stop = exchange.start_us, exchange.start_us + exchange.duration_us
        others = (
            (max(start, e.start_us), min(stop, e.start_us + e.duration_us))
            for e in computing
            if e.thread != exchange.thread
        )
        total += stop - start
        hidden += length(joined(others))
    return hidden / total if total else None


def draw_timeline(
    events: Sequence[TraceEvent],
    title: str,
    optimizers: Sequence[str] = (),
    first_rank: int = 0,
) -> str:
    """The HTML page of a step; `first_rank` is that of this host's first replica."""
    first = min(e.start_us for e in events)
    last = max(e.start_us + e.duration_us for e in events)
    scale = (_WIDTH - _LEFT - 10) / max(last - first, 1e-9)
    lanes = _lanes(events, first_rank)
    height = _TOP + len(lanes) * (_LANE + _GAP) + 20
    parts = [
        f'<svg width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}">',
        *_axis((last - first) / 1e3, scale * 1e3, height),
    ]
    for number, (lane, of_lane) in enumerate(lanes.items()):
        y = _TOP + number * (_LANE + _GAP)
        parts.append(f'<text x="4" y="{y + 17}">{lane}</text>')
        for event in of_lane:
            width = event.duration_us * scale
            if width < _THINNEST:
                continue
            x = _LEFT + (event.start_us - first) * scale
            colour = COLOURS[kind_of(event.name, optimizers)]
            ms = f"{event.duration_us / 1e3:.3f} ms"
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.4):.2f}" '
                f'height="{_LANE}" fill="{colour}"><title>'
                f"{html.escape(f'{lane}, {event.name}: {ms}')}</title></rect>"
            )
    parts.append("</svg>")
    hint = (
        "<p>A replica has a lane for each thread that ran its ops. Point at a box to "
        "see the op.</p>"
    )
    return html_page(title, legend(COLOURS), scrolls("\n".join(parts)), hint)


def _lanes(
    events: Sequence[TraceEvent], first_rank: int
) -> dict[str, list[TraceEvent]]:
    """The events of each lane: of a replica, or the input pipeline, and a thread."""
    by_lane: dict[tuple[int, str], list[TraceEvent]] = {}
    for event in events:
        rank = replica_of(event.name, first_rank)
        key = (-1 if rank is None else rank, event.thread)
        by_lane.setdefault(key, []).append(event)
    threads: dict[int, int] = {}
    lanes = {}
    for rank, thread in sorted(by_lane):
        threads[rank] = threads.get(rank, 0) + 1
        name = "input" if rank < 0 else f"replica {rank}"
        if threads[rank] > 1:
            name += f", thread {threads[rank]}"
        lanes[name] = by_lane[rank, thread]
    return lanes


def _axis(total_ms: float, scale: float, height: int) -> list[str]:
    ticks = ticks_between(0.0, max(total_ms, 1e-3), _MOST_TICKS)
    return [
        svg_line(x, _TOP - 6, x, height - 16, "#ddd")
        + svg_text(x, 16, f"{tick:g} ms", "middle")
        for tick in ticks
        for x in [_LEFT + tick * scale]
    ]


# Time spans (from, to) and operations on sorted lists of disjoint spans.
Span = tuple[float, float]


def joined(spans: Iterable[Span]) -> list[Span]:
    """The union, sorted and disjoint; a span that ends before it begins is empty.

    >>> joined([(4, 6), (0, 2), (1, 3), (9, 8)])
    [(0, 3), (4, 6)]
    """
    union: list[Span] = []
    for start, stop in sorted(spans):
        if stop <= start:
            continue
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], stop)
        else:
            union.append((start, stop))
    return union


def length(spans: Iterable[Span]) -> float:
    """The total length of disjoint spans."""
    return sum(stop - start for start, stop in spans)


def both(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The intersection of two sorted, disjoint lists.

    >>> both([(0, 3), (4, 6)], [(2, 5)])
    [(2, 3), (4, 5)]
    """
    return without(first, without(first, second))


def without(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The difference of two sorted, disjoint lists.

    >>> without([(0, 3), (4, 6)], [(2, 5)])
    [(0, 2), (5, 6)]
    """
    found: list[Span] = []
    place = 0
    for start, stop in first:
        while place < len(second) and second[place][1] <= start:
            place += 1
        here = place
        while here < len(second) and second[here][0] < stop:
            if second[here][0] > start:
                found.append((start, second[here][0]))
            start = max(start, second[here][1])
            here += 1
        if start < stop:
            found.append((start, stop))
    return found


def chrome_trace(
    events: Sequence[TraceEvent],
    optimizers: Sequence[str] = (),
    *,
    host: int = 0,
    hosts: int = 1,
    first_rank: int = 0,
) -> str:
    """The step in Chrome's "Trace Event Format", for Perfetto and `chrome://tracing`.

    A process per replica of this host, with its threads. The first replica includes
    shared ops: TensorFlow gives both no scope.
    """
    first_us = min(event.start_us for event in events)
    threads = list(dict.fromkeys(event.thread for event in events))
    place = f"host {host}" if hosts > 1 else "host"
    rows: dict[tuple[int, int], None] = {}
    complete: list[dict[str, Any]] = []
    for event in events:
        rank = replica_of(event.name, first_rank)
        # Perfetto does not name process 0.
        process = 1 if rank is None else 2 + rank
        thread = 1 + threads.index(event.thread)
        rows[process, thread] = None
        complete.append(
            {
                "ph": "X",
                "name": event.name,
                "cat": kind_of(event.name, optimizers),
                "ts": round(event.start_us - first_us, 3),
                "dur": round(event.duration_us, 3),
                "pid": process,
                "tid": thread,
                "args": {"host": host, "replica": rank},
            }
        )
    named = []
    for process, thread in sorted(rows):
        of = f"{place}, input" if process == 1 else f"{place}, replica {process - 2}"
        named.append(_named("process_name", process, thread, of))
        named.append(_named("thread_name", process, thread, f"thread {thread}"))
    return json.dumps({"traceEvents": [*named, *complete], "displayTimeUnit": "ms"})


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return dict(ph="M", name=what, pid=process, tid=thread, args={"name": name})
