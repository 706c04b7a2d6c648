"""Reads a trace of `StepTimeline`: the time of each part, per replica."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdp.checks import is_number
from tfdp.errors import DataError
from tfdp.files.checked_json import is_count, open_regular_file, parse_json
from tfdp.tools.report import timeline_page as timeline

MOST_BYTES, MOST_EVENTS = 2**28, 2_000_000
# Above this, differences of float64 times lose microseconds.
MOST_US = 1e15


@dataclasses.dataclass(frozen=True)
class ReplicaTrace:
    """The threads of one replica in the steps of a trace."""

    rank: int
    part_seconds: Mapping[str, float]  # add up to the duration of the trace

    @property
    def hidden_share(self) -> float | None:
        """Share of the exchange time that overlaps computing; None: no exchanges."""
        hidden = self.part_seconds["exchange behind computing"]
        total = hidden + self.part_seconds["exchange alone"]
        return hidden / total if total else None


def read_trace(path: str | os.PathLike[str]) -> list[ReplicaTrace]:
    """The replicas of a trace, by rank; raises DataError if it is not a valid trace."""
    try:
        events = _events(_content(Path(path)))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise DataError(
            f"{path}: {error}. It is not a trace of tfdp.callbacks.StepTimeline."
        ) from None
    first = min(start for spans in events.values() for start, _, _ in spans)
    last = max(stop for spans in events.values() for _, stop, _ in spans)
    return [
        ReplicaTrace(rank, _parts(spans, (last - first) / 1e6))
        for rank, spans in sorted(events.items())
    ]


def _content(path: Path) -> Any:
    with open_regular_file(path) as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
    return parse_json(text)


def _events(content: Any) -> dict[int, list[tuple[float, float, str]]]:
    """(start, stop, kind) in microseconds, by replica."""
    listed = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(listed, list) or len(listed) > MOST_EVENTS:
        raise ValueError(f"it has no list of at most {MOST_EVENTS:,} events")
    found: dict[int, list[tuple[float, float, str]]] = {}
    for event in listed:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        start: Any = event.get("ts")
        duration: Any = event.get("dur")
        kind: Any = event.get("cat")
        arguments = event.get("args")
        rank: Any = arguments.get("replica") if isinstance(arguments, dict) else None
        if rank is None:
            continue  # of the input pipeline
        if not (is_count(rank) and isinstance(kind, str)):
            raise ValueError("an event has no replica")
        if not (_is_time(start) and _is_time(duration)):
            raise ValueError("an event has no time")
        found.setdefault(rank, []).append((start, start + duration, kind))
    if not found:
        raise ValueError("no event has a replica")
    return found


def _is_time(value: Any) -> bool:
    return is_number(value) and 0 <= value <= MOST_US and math.isfinite(value)


def _parts(events: list[tuple[float, float, str]], seconds: float) -> dict[str, float]:
    exchanges = frozenset(timeline.EXCHANGES.values())

    def spans(*, exchange: bool = False, update: bool = False) -> list[timeline.Span]:
        return timeline.joined(
            (start, stop)
            for start, stop, kind in events
            if (kind in exchanges, kind == timeline.UPDATE) == (exchange, update)
        )

    computing, exchange = spans(), spans(exchange=True)
    update = timeline.without(spans(update=True), computing)
    busy = timeline.joined([*computing, *update])
    parts = {
        "computing": timeline.length(timeline.without(computing, exchange)) / 1e6,
        "exchange behind computing": timeline.length(timeline.both(exchange, busy))
        / 1e6,
        "exchange alone": timeline.length(timeline.without(exchange, busy)) / 1e6,
        "update of weights": timeline.length(timeline.without(update, exchange)) / 1e6,
    }
    return {**parts, "nothing": max(0.0, seconds - sum(parts.values()))}
