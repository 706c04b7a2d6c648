"""Traces of single steps in Chrome's Trace Event Format: writes and reads them.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdp.checks import is_number
from tfdp.errors import DataError
from tfdp.files.checked_json import is_count, open_regular_file, parse_json
from tfdp.tools.runs.spans import Span, both, joined, length, without

if TYPE_CHECKING:
    from tfdp._private.step_trace import TraceEvent

ENDING = ".trace.json"
# Part of an op's name -> kind.
EXCHANGES = {
    "tfdp_all_gather": "gather of weights",
    "tfdp_reduce_scatter": "scatter of gradients",
    "tfdp_all_reduce": "sum of gradients",
}
UPDATE, COMPUTING = "update of weights", "computing"
KINDS = (*EXCHANGES.values(), UPDATE, COMPUTING)
# TensorFlow's name scope of all replicas but the first.
REPLICA = re.compile(r"(?:^|/)replica_(\d+)/")
# Ops outside of the step belong to the input pipeline.
STEP = re.compile(r"PartitionedCall/")
MOST_BYTES, MOST_EVENTS = 2**28, 2_000_000
# Above this, differences of float64 times lose microseconds.
MOST_US = 1e15


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
    return UPDATE if is_update else COMPUTING


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
    seconds = dict.fromkeys(KINDS, 0.0)
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


def chrome_trace(
    events: Sequence[TraceEvent],
    optimizers: Sequence[str] = (),
    *,
    steps: str = "",
    host: int = 0,
    hosts: int = 1,
    first_rank: int = 0,
) -> str:
    """The JSON text of a trace: a process per replica of this host, with its threads.

    The first replica includes shared ops: TensorFlow gives both no scope. `steps`
    names the steps of the trace.
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
    named = [
        _named("thread_name", process, thread, f"thread {thread}")
        for process, thread in sorted(rows)
    ]
    for process in sorted({process for process, _ in rows}):
        of = "input" if process == 1 else f"replica {process - 2}"
        # The format ignores the thread of a process's name.
        named.append(_named("process_name", process, 0, f"{place}, {of}"))
    trace = {
        "traceEvents": [*named, *complete],
        "displayTimeUnit": "ms",
        "otherData": {"steps": steps},
    }
    return json.dumps(trace)


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return dict(ph="M", name=what, pid=process, tid=thread, args={"name": name})


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
