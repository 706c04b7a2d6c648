"""A worker's progress notes to the launcher.

A training loop notes the step it resumed from, each completed step and each saved step:
updates since the training began, over all restarts. `tfdp launch --max-restarts`
reports what a failure cost and whether training advances. A worker also notes each
strategy over all workers it starts to create: one that exits after fewer than another
will never reach the point where that one waits.

A note is a fixed-size record in a file named after the process, in the launcher's
folder: one system call per step. Without such a launcher nothing is written, and
`own_progress` knows the notes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from tfdp.cluster.description import integer, present, quoted
from tfdp.errors import ConfigurationError
from tfdp.files.checked_json import LARGEST_COUNT, is_count, open_regular_file

FOLDER_VARIABLE = "TFDP_PROGRESS"
# Magic; steps resumed from, saved and done; number of strategies; times of resume and
# save by the machine's monotonic clock; a checksum, as readers may see a partial write.
BODY = struct.Struct("<8sqqqqdd")
CHECKSUM = struct.Struct("<I")
RECORD_BYTES = BODY.size + CHECKSUM.size
MARK = b"tfdp-at\x02"
UNKNOWN = -1


@dataclasses.dataclass(frozen=True)
class Progress:
    """A worker's notes; None for those not made."""

    resumed_step: int | None = None  # where training went on from
    saved_step: int | None = None  # of the newest complete save
    step: int | None = None  # the last completed one
    resumed_seconds: float | None = None  # by `time.monotonic` of the reader's machine
    saved_seconds: float | None = None  # likewise
    strategies: int | None = None  # over all workers, started to create

    @property
    def reached_step(self) -> int | None:
        steps = (self.resumed_step, self.saved_step, self.step)
        return max((step for step in steps if step is not None), default=None)

    def to_text(self) -> str:
        """A record for `parse_progress`, with ages for times, as clocks differ."""
        counts = (self.resumed_step, self.saved_step, self.step, self.strategies)
        times = (self.resumed_seconds, self.saved_seconds)
        now_seconds = time.monotonic()
        return _record(
            (UNKNOWN if count is None else count for count in counts),
            (now_seconds - (math.nan if t is None else t) for t in times),
        ).hex()


class _Notes:
    """The progress notes of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.descriptor: int | None = None
        self.counts = dict.fromkeys(("resumed", "saved", "done"), UNKNOWN)
        self.counts["strategies"] = 0
        self.seconds = {"resumed": math.nan, "saved": math.nan}

    def record(self) -> bytes:
        return _record(self.counts.values(), self.seconds.values())


def _record(counts: Iterable[int], seconds: Iterable[float]) -> bytes:
    body = BODY.pack(MARK, *counts, *seconds)
    return body + CHECKSUM.pack(zlib.crc32(body))


_notes = _Notes()


def _forget() -> None:
    global _notes  # a forked child starts with none
    _notes = _Notes()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def note_resumed(step: int) -> None:
    """Notes, before the first step, that training resumes from `step` (0: no save)."""
    _note("resumed", step)


def note_saved(step: int) -> None:
    """Notes that a checkpoint of `step` is complete; see `note_step`."""
    _note("saved", step)


def note_step(step: int) -> None:
    """Notes that `step` updates since the training began are done.

    Cost: writes 60 bytes to an open file, some microseconds; nothing without a
    launcher. A full or missing disk is no error: the note is lost.
    """
    _note("done", step)


def note_strategy() -> None:
    """Notes that this worker starts to create a strategy that needs all workers."""
    _note("strategies", _notes.counts["strategies"] + 1)


def begin_notes(folder: str, process: int) -> None:
    """The launcher's part: creates a started worker's notes file, which notes need."""
    path = Path(folder, file_name(process))
    first = path.with_suffix(".first")
    with contextlib.suppress(OSError):
        first.write_bytes(_Notes().record())
        try:
            os.link(first, path)  # never overwrites what the process already noted
        finally:
            first.unlink()


def _note(what: str, step: int) -> None:
    if not is_count(step):
        raise ConfigurationError(
            f"a step must be a Python int from 0 to {LARGEST_COUNT}, the updates done. "
            f"Received: {quoted(step)}. Take int(...) of an optimizer's `iterations`."
        )
    folder = os.environ.get(FOLDER_VARIABLE)
    with _notes.lock, contextlib.suppress(OSError):
        _notes.counts[what] = step
        if what in _notes.seconds:
            _notes.seconds[what] = time.monotonic()
        if not folder:
            return
        if _notes.descriptor is None:
            path = Path(folder, file_name(os.getpid()))
            # Nothing at that path may block the training.
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            _notes.descriptor = os.open(path, flags, 0o600)
        os.pwrite(_notes.descriptor, _notes.record(), 0)


def own_progress() -> Progress:
    """The notes of this process, with or without a launcher."""
    with _notes.lock:
        record = _notes.record()
    return _parse_record(record) or Progress()


def file_name(process: int) -> str:
    """The name of the notes file of a process."""
    return f"{process}.progress"


def read_progress(folder: str, process: int) -> Progress | None:
    """The notes of a process; None if there are none, or invalid ones.

    The folder may hold anything: no link is followed, no pipe waited for, and at most a
    record read.
    """
    path = Path(folder, file_name(process))
    try:
        with open_regular_file(path, os.O_NOFOLLOW) as file:
            return _parse_record(file.read(RECORD_BYTES + 1))
    except OSError:
        return None


def _parse_record(record: bytes, are_ages: bool = False) -> Progress | None:
    if len(record) != RECORD_BYTES:
        return None
    body, checksum = record[: BODY.size], record[BODY.size :]
    if CHECKSUM.unpack(checksum) != (zlib.crc32(body),):
        return None
    mark, *counts, resumed_seconds, saved_seconds = BODY.unpack(body)
    if mark != MARK or any(count < UNKNOWN for count in counts):
        return None
    resumed, saved, done, strategies = (
        None if count == UNKNOWN else count for count in counts
    )
    return Progress(
        resumed_step=resumed,
        saved_step=saved,
        step=done,
        resumed_seconds=None if resumed is None else _past(resumed_seconds, are_ages),
        saved_seconds=None if saved is None else _past(saved_seconds, are_ages),
        strategies=strategies,
    )


def _past(seconds: float, is_age: bool) -> float | None:
    now_seconds = time.monotonic()
    if not 0 <= seconds <= now_seconds:
        return None
    return now_seconds - seconds if is_age else seconds


def parse_progress(text: bytes) -> Progress | None:
    """The inverse of `Progress.to_text`; None for invalid text."""
    try:
        return _parse_record(bytes.fromhex(text.decode("ascii")), are_ages=True)
    except ValueError:
        return None


#: Exit code of a worker that was stopped, has saved, and would resume from there:
#: EX_TEMPFAIL of BSD's sysexits.h ("the user is invited to retry"), not used by Python,
#: shells or signals (128 and above).
START_AGAIN = 75
RESTARTS = "TFDP_RESTARTS"


def restarts(environment: Mapping[str, str] | None = None) -> int:
    """How often `tfdp launch` has restarted this training; 0 the first time.

    Args:
      environment: variables by name; None takes those of this process.

    Raises:
      ClusterError: TFDP_RESTARTS is no integer of at least 0.

    >>> restarts({}), restarts({"TFDP_RESTARTS": "2"})
    (0, 2)
    """
    found = present(os.environ if environment is None else environment, RESTARTS)
    return integer(found, RESTARTS, least=0) or 0
