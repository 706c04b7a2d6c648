"""Reads the directory of a run: whatever lies in it, an error or what it says.

The files may come from killed processes, full disks, other programs and strangers. No
link or pipe is waited for, no more is read than the limits, and what means nothing is
left out and told.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tfdp.errors import DataError
from tfdp.tools.runs.entries import End, Entry, Epoch, Start, Steps, entry_from
from tfdp.tools.runs.lines import MOST_LINE_BYTES, content_of
from tfdp.tools.runs.run_file import name_of_file

FILE = re.compile(r"worker-(0|[1-9]\d{0,6})\.jsonl")
TRACE_ENDING = ".trace.json"
MOST_FILE_BYTES, MOST_LINES = 2**28, 500_000
MOST_TRACES, MOST_TOLD = 64, 20


@dataclasses.dataclass
class WorkerRun:
    """What one worker has told of one start.

    Args:
      start: its first line.
      steps, epochs: in their order.
      end: None: the process was killed, or trains on.
    """

    start: Start
    steps: list[Steps] = dataclasses.field(default_factory=list)
    epochs: list[Epoch] = dataclasses.field(default_factory=list)
    end: End | None = None

    @property
    def last_seconds(self) -> float:
        """When it was last heard of, since its start."""
        told: list[Steps | Epoch | End] = [*self.steps[-1:], *self.epochs[-1:]]
        if self.end is not None:
            told.append(self.end)
        return max((entry.at_seconds for entry in told), default=0.0)

    @property
    def first_step(self) -> int | None:
        """How many steps the training had made before; None: not known.

        By the place in the data of the first line, which a training that goes on has.
        """
        if not self.steps:
            return None
        first, per_epoch = self.steps[0], self.start.steps_per_epoch
        if first.epoch and per_epoch is None:
            return None
        return max(0, first.epoch * (per_epoch or 0) + first.batch - first.steps)


@dataclasses.dataclass
class Session:
    """What all workers have told of one start.

    Args:
      workers: by rank, those whose files are there.
    """

    workers: dict[int, WorkerRun]

    @property
    def first(self) -> WorkerRun:
        """The lowest rank that is there."""
        return self.workers[min(self.workers)]

    @property
    def missing(self) -> list[int]:
        """The ranks whose files are not there."""
        return [
            rank for rank in range(self.first.start.workers) if rank not in self.workers
        ]


@dataclasses.dataclass
class Run:
    """A run, as far as it can be read.

    Args:
      directory: where it lies.
      sessions: every start, the first one first; at least one.
      traces: of `StepTimeline`, in the same directory.
      notes: what is missing or damaged, in sentences.
    """

    directory: Path
    sessions: list[Session]
    traces: list[Path]
    notes: list[str]


def is_read(name: str) -> bool:
    """Whether `read_run` takes a file of this name in a run's directory for its record.

    >>> is_read("worker-0.jsonl"), is_read("report.html")
    (True, False)
    """
    return FILE.fullmatch(name) is not None or name.endswith(TRACE_ENDING)


def read_run(directory: str | os.PathLike[str]) -> Run:
    """What `tfdp.callbacks.RunRecord` has written.

    Args:
      directory: that it was given.

    Raises:
      DataError: there is no such directory, or nothing of a run in it that can be read.
    """
    folder = Path(directory)
    notes: list[str] = []
    told: dict[str, dict[int, WorkerRun]] = {}
    names = _names_in(folder)
    workers = sorted(int(m[1]) for name in names if (m := FILE.fullmatch(name)))
    for worker in workers:
        for key, mine in _read_file(folder, worker, notes).items():
            told.setdefault(key, {})[worker] = mine
    if not told:
        raise DataError(
            f"{folder} has no run that can be read. "
            + (f"{' '.join(notes)} " if notes else "")
            + "Give the directory of a tfdp.callbacks.RunRecord, which holds "
            f"{name_of_file(0)}."
        )
    sessions = [Session(dict(sorted(workers.items()))) for workers in told.values()]
    sessions.sort(key=lambda session: session.first.start.began_seconds)
    for session in sessions:
        if session.missing:
            notes.append(_missing(session))
    # Other names could not be printed.
    named = [name for name in names if name.isprintable()]
    traces = [name for name in named if name.endswith(TRACE_ENDING)]
    if len(traces) > MOST_TRACES:
        notes.append(f"Of {len(traces)} traces {MOST_TRACES} are shown.")
    paths = [folder / name for name in traces[:MOST_TRACES]]
    if len(notes) > MOST_TOLD:
        more = len(notes) - MOST_TOLD
        notes = [*notes[:MOST_TOLD], f"And {more} more of this kind."]
    return Run(folder, sessions, paths, notes)


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise DataError(
            f"{folder}: {error.strerror}. `tfdp report` takes the directory that "
            "tfdp.callbacks.RunRecord was given."
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
    """What a file says, by session; what is wrong with it goes into `notes`."""
    name = name_of_file(worker)
    found: dict[str, WorkerRun] = {}
    damaged, homeless, unknown, lines, first_reason = 0, 0, 0, 0, ""
    is_torn = False
    try:
        with _opened(folder / name) as file:
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
                elif not _take(entry, worker, found):
                    homeless += 1
    except OSError as error:
        notes.append(f"{name} cannot be read ({error.strerror or error}).")
    except ValueError as error:
        notes.append(f"{name} is read in part: {error}.")
    if is_torn:
        notes.append(f"{name} ends within a line: its process was killed, or writes.")
    for count, what in (
        (damaged, f"damaged and left out ({first_reason:.200})"),
        (homeless, "of no start that can be read, and left out"),
        (unknown, "of a kind that this version does not know, and left out"),
    ):
        if count:
            verb = "is" if count == 1 else "are"
            notes.append(f"{name}: {count} of {lines} lines {verb} {what}.")
    for mine in found.values():
        mine.steps = _in_order(mine.steps)
        mine.epochs.sort(key=lambda epoch: (epoch.step, epoch.epoch))
    return found


def _take(entry: Entry, worker: int, found: dict[str, WorkerRun]) -> bool:
    """Puts an entry where it belongs; False: nowhere."""
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
    else:
        mine.end = entry
    return True


def _in_order(steps: list[Steps]) -> list[Steps]:
    """By step, each step once."""
    ordered: list[Steps] = []
    for entry in sorted(steps, key=lambda entry: entry.step):
        if not ordered or entry.step - entry.steps >= ordered[-1].step:
            ordered.append(entry)
    return ordered


def _opened(path: Path) -> BinaryIO:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "it is no regular file")
    return os.fdopen(descriptor, "rb")


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines; of one that is too long the beginning, which has no checksum.

    Raises:
      ValueError: when there are too many, or too many bytes.
    """
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
