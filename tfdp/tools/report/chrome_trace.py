"""A step as a file that Perfetto and `chrome://tracing` open.

The form is Chrome's: "Trace Event Format", complete events ("X") and metadata ("M").
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tfdp.tools.report.timeline_page import Event, kind_of, replica_of

__all__ = ["chrome_trace"]


def chrome_trace(
    events: Sequence[Event],
    optimizers: Sequence[str] = (),
    *,
    host: int = 0,
    hosts: int = 1,
    first_rank: int = 0,
) -> str:
    """The file's text: a process for each replica of this host, its threads in it.

    The first replica's has what is done for all of them as well: TensorFlow gives both
    no scope of their own.

    Args:
      events: of some steps, at least one; times in microseconds.
      optimizers: what the optimizers are called.
      host: this one, from 0.
      hosts: how many there are.
      first_rank: of the first replica of this host.
    """
    first_us = min(event.start_us for event in events)
    threads = {
        name: n for n, name in enumerate(dict.fromkeys(e.thread for e in events))
    }
    place = f"host {host}" if hosts > 1 else "host"
    rows: dict[tuple[int, int], None] = {}
    complete: list[dict[str, Any]] = []
    for event in events:
        rank = replica_of(event.name, first_rank)
        # Perfetto leaves process 0 without a name.
        process = 1 if rank is None else 2 + rank
        thread = 1 + threads[event.thread]
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
    return {
        **{"ph": "M", "name": what, "pid": process, "tid": thread},
        "args": {"name": name},
    }
