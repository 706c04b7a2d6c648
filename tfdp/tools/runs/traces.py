"""What a trace of `StepTimeline` tells of each replica: which part took how long."""

from __future__ import annotations

import dataclasses
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdp.checks import is_number
from tfdp.errors import DataError
from tfdp.files.checked_json import is_count, parse_json
from tfdp.tools.report.timeline_page import (
    EXCHANGES,
    UPDATE,
    Span,
    both,
    joined,
    length,
    without,
)

MOST_BYTES, MOST_EVENTS = 2**28, 2_000_000
# Beyond it the difference of two times is rounded to microseconds.
MOST_US = 1e15
PARTS = (
    "computing",
    "exchange behind computing",
    "exchange alone",
    "update of weights",
    "nothing",
)


@dataclasses.dataclass(frozen=True)
class ReplicaTrace:
    """What the threads of one replica did in the steps of a trace.

    Args:
      rank: of the replica.
      part_seconds: by name, in the order of PARTS; together the time of the trace.
    """

    rank: int
    part_seconds: Mapping[str, float]

    @property
    def hidden_share(self) -> float | None:
        """Of the exchanges' time, that in which the replica computed; None: no time."""
        hidden = self.part_seconds["exchange behind computing"]
        total = hidden + self.part_seconds["exchange alone"]
        return hidden / total if total else None


def read_trace(path: str | os.PathLike[str]) -> list[ReplicaTrace]:
    """The replicas of a trace, by rank.

    Raises:
      DataError: the file is missing, too large, damaged, or no trace of `StepTimeline`.
    """
    try:
        events = _events(_content(Path(path)))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise DataError(
            f"{path}: {error}. It is no trace that tfdp.callbacks.StepTimeline wrote."
        ) from None
    first = min(start for spans in events.values() for start, _, _ in spans)
    last = max(stop for spans in events.values() for _, stop, _ in spans)
    return [
        ReplicaTrace(rank, _parts(spans, (last - first) / 1e6))
        for rank, spans in sorted(events.items())
    ]


def _content(path: Path) -> Any:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no regular file")
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
            continue  # the input's
        if not (is_count(rank) and isinstance(kind, str)):
            raise ValueError("an event is of no replica")
        if not (_is_time(start) and _is_time(duration)):
            raise ValueError("an event has no time")
        found.setdefault(rank, []).append((start, start + duration, kind))
    if not found:
        raise ValueError("no event is of a replica")
    return found


def _is_time(value: Any) -> bool:
    return is_number(value) and 0 <= value <= MOST_US and math.isfinite(value)


def _parts(events: list[tuple[float, float, str]], seconds: float) -> dict[str, float]:
    exchanges = frozenset(EXCHANGES.values())

    def spans(*, exchange: bool = False, update: bool = False) -> list[Span]:
        return joined(
            (start, stop)
            for start, stop, kind in events
            if (kind in exchanges, kind == UPDATE) == (exchange, update)
        )

    computing, exchange = spans(), spans(exchange=True)
    update = without(spans(update=True), computing)
    busy = joined([*computing, *update])
    parts = {
        "computing": length(without(computing, exchange)) / 1e6,
        "exchange behind computing": length(both(exchange, busy)) / 1e6,
        "exchange alone": length(without(exchange, busy)) / 1e6,
        "update of weights": length(without(update, exchange)) / 1e6,
    }
    return {**parts, "nothing": max(0.0, seconds - sum(parts.values()))}
