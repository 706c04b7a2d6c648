"""Reads the directory of a run, in which any file may be damaged or foreign.

Files may come from killed processes, full disks, other programs or attackers: no link
or pipe blocks, reads are limited, and invalid content is skipped and reported.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tfdp.errors import DataError
from tfdp.files.checked_json import open_regular_file
from tfdp.files.near import did_you_mean_path
from tfdp.tools.runs.entries import End, Entry, Epoch, Said, Start, Steps, entry_from
from tfdp.tools.runs.lines import MOST_LINE_BYTES, content_of
from tfdp.tools.runs.run_file import name_of_file
from tfdp.tools.runs.traces import ENDING

FILE = re.compile(r"worker-(0|[1-9]\d{0,6})\.jsonl")
MOST_FILE_BYTES, MOST_LINES = 2**28, 500_000
MOST_TRACES, MOST_NOTES = 64, 20


@dataclasses.dataclass
class WorkerRun:
    """The record of one worker of one start."""

    start: Start
    steps: list[Steps] = dataclasses.field(default_factory=list)  # in order
    epochs: list[Epoch] = dataclasses.field(default_factory=list)
    said: list[Said] = dataclasses.field(default_factory=list)  # in order
    end: End | None = None  # None: the process was killed, or still trains

    @property
    def last_seconds(self) -> float:
        last = (*self.steps[-1:], *self.epochs[-1:], self.end)
        return max((entry.at_seconds for entry in last if entry), default=0.0)

    @property
    def first_step(self) -> int | None:
        """Steps of the training before this start, by its first line; None: unknown."""
        if not self.steps:
            return None
        first, per_epoch = self.steps[0], self.start.steps_per_epoch
        if first.epoch and per_epoch is None:
            return None
        return max(0, first.epoch * (per_epoch or 0) + first.batch - first.steps)


@dataclasses.dataclass
class Session:
    """The records of all workers of one start."""

    workers: dict[int, WorkerRun]  # by rank; only those with files

    @property
    def first(self) -> WorkerRun:
        return self.workers[min(self.workers)]

    @property
    def missing(self) -> list[int]:
        return sorted(set(range(self.first.start.workers)) - set(self.workers))


@dataclasses.dataclass
class Run:
    """A run, as far as it is readable."""

    directory: Path
    sessions: list[Session]  # every start, in order; at least one
    traces: list[Path]  # of `StepTimeline`
    notes: list[str]  # what is missing or damaged, in sentences


def is_record_file(name: str) -> bool:
    """Whether `read_run` reads a file of this name."""
    return FILE.fullmatch(name) is not None or name.endswith(ENDING)


def read_run(directory: str | os.PathLike[str]) -> Run:
    """Reads the directory of a `RunRecord`; raises DataError without a readable run."""
    folder = Path(directory)
    notes: list[str] = []
    found: dict[str, dict[int, WorkerRun]] = {}
    names = _names_in(folder)
    for worker in sorted(int(m[1]) for name in names if (m := FILE.fullmatch(name))):
        for key, mine in _read_file(folder, worker, notes).items():
            found.setdefault(key, {})[worker] = mine
    if not found:
        raise DataError(
            f"{folder} has no run that can be read. "
            + (f"{' '.join(notes)} " if notes else "")
            + "Give the directory of a tfdp.callbacks.RunRecord, which holds "
            f"{name_of_file(0)}."
        )
    sessions = [Session(dict(sorted(workers.items()))) for workers in found.values()]
    sessions.sort(key=lambda session: session.first.start.began_seconds)
    for session in sessions:
        if session.missing:
            notes.append(_missing(session))
    traces = [n for n in names if n.isprintable() and n.endswith(ENDING)]
    if len(traces) > MOST_TRACES:
        notes.append(f"Of {len(traces)} traces {MOST_TRACES} are shown.")
    paths = [folder / name for name in traces[:MOST_TRACES]]
    if len(notes) > MOST_NOTES:
        more = len(notes) - MOST_NOTES
        notes = [*notes[:MOST_NOTES], f"And {more} more of this kind."]
    return Run(folder, sessions, paths, notes)


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise DataError(
            f"{folder}: {error.strerror}. `tfdp report` takes the directory that "
            "tfdp.callbacks.RunRecord was given."
            f"{did_you_mean_path(str(folder), os.path.isdir)}"
        ) from error


def _missing(session: Session) -> str:
    first, missing = session.first.start, session.missing
    named = ", ".join(
        name_of_file(rank)
        + (f" (host {first.hosts[rank]})" if rank < len(first.hosts) else "")
        for rank in missing[:8]
    )
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    return (
        f"{len(missing)} of {first.workers} workers are missing: {named}{more}. What "
        "they did is not in this report. Where each host writes to a disk of its own, "
        "copy the files into one directory."
    )


def _read_file(folder: Path, worker: int, notes: list[str]) -> dict[str, WorkerRun]:
    """Reads a file, by session; adds its problems to `notes`."""
    name = name_of_file(worker)
    found: dict[str, WorkerRun] = {}
    damaged, orphaned, unknown, lines, first_reason = 0, 0, 0, 0, ""
    is_torn = False
    try:
        with open_regular_file(folder / name) as file:
            for lines, line in enumerate(_lines(file), start=1):
                if not line.strip():
                    continue
                try:
                    entry = entry_from(content_of(line))
                except ValueError as error:
                    is_torn = not line.endswith(b"\n")
                    damaged += not is_torn
                    first_reason = first_reason or f"line {lines}: {error}"
                    continue
                if entry is None:
                    unknown += 1
                elif not _add_entry(entry, worker, found):
                    orphaned += 1
    except OSError as error:
        notes.append(f"{name} cannot be read ({error.strerror or error}).")
    except ValueError as error:
        notes.append(f"{name} is read in part: {error}.")
    if is_torn:
        notes.append(f"{name} ends within a line: its process was killed or writes.")
    for count, what in (
        (damaged, f"damaged and left out ({first_reason:.200})"),
        (orphaned, "of no start that can be read, and left out"),
        (unknown, "of a kind that this version does not know, and left out"),
    ):
        if count:
            verb = "is" if count == 1 else "are"
            notes.append(f"{name}: {count} of {lines} lines {verb} {what}.")
    for mine in found.values():
        mine.steps = _in_order(mine.steps)
        mine.epochs.sort(key=lambda epoch: (epoch.step, epoch.epoch))
    return found


def _add_entry(entry: Entry, worker: int, found: dict[str, WorkerRun]) -> bool:
    """Adds an entry to its session; False: it has none."""
    if isinstance(entry, Start):
        if entry.worker != worker or entry.workers <= worker or entry.session in found:
            return False
        found[entry.session] = WorkerRun(entry)
        return True
    mine = found.get(entry.session)
    if mine is None:
        return False
    if isinstance(entry, Steps):
        mine.steps.append(entry)
    elif isinstance(entry, Epoch):
        mine.epochs.append(entry)
    elif isinstance(entry, Said):
        mine.said.append(entry)
    else:
        mine.end = entry
    return True


def _in_order(steps: list[Steps]) -> list[Steps]:
    """Sorted by step, without duplicates."""
    ordered: list[Steps] = []
    for entry in sorted(steps, key=lambda entry: entry.step):
        if not ordered or entry.step - entry.steps >= ordered[-1].step:
            ordered.append(entry)
    return ordered


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields lines, overlong ones without checksum; raises ValueError at limits."""
    size_bytes = 0
    for number in range(MOST_LINES + 1):
        line = file.readline(MOST_LINE_BYTES)
        if not line:
            return
        size_bytes += len(line)
        if number == MOST_LINES or size_bytes > MOST_FILE_BYTES:
            raise ValueError(
                f"it has more than {MOST_LINES:,} lines or {MOST_FILE_BYTES:,} bytes"
            )
        whole = line
        while len(line) == MOST_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(MOST_LINE_BYTES)
            size_bytes += len(line)
            if size_bytes > MOST_FILE_BYTES:
                raise ValueError(f"it has more than {MOST_FILE_BYTES:,} bytes")
            whole = b"(too long)\n"
        yield whole
