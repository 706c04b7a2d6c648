"""How far a worker is, told to the launcher that watches it.

A training loop notes the step it has resumed from, each step it has done and each step
that is saved whole; `tfdp launch --max-restarts` reads it to say what a failure has
cost, and whether the training gets anywhere. A step is the number of updates since the
training began, over all restarts. Without such a launcher nothing is written.

A worker also notes each strategy of all workers that it begins to make: a worker that
has ended and made fewer than another one will not come to where that one waits.

The note is one record of a fixed size in a file named for the process, in the folder
that the launcher names: a system call, no file is opened or renamed for a step. The
launcher makes the file with the worker: where it is missing, notes are lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import stat
import struct
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdp.checks import is_number
from tfdp.cluster.description import integer, present
from tfdp.errors import ConfigurationError
from tfdp.files.checked_json import LARGEST_COUNT, is_count, parse_json

FOLDER_VARIABLE = "TFDP_PROGRESS"
# A mark; steps resumed from, saved and done; strategies of all workers; when resumed
# and saved, by the clock that all processes of a machine share; a checksum, as it may
# be read while it is written.
BODY = struct.Struct("<8sqqqqdd")
CHECKSUM = struct.Struct("<I")
RECORD_BYTES = BODY.size + CHECKSUM.size
MARK = b"tfdp-at\x02"
UNKNOWN = -1
NO_TIMES = (math.nan, math.nan)
NONE = {"strategies": 0}


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a worker has noted; None where it has not.

    Args:
      resumed_step: from which it went on.
      saved_step: of the newest save that was whole.
      step: the last that was done.
      resumed_seconds, saved_seconds: when, by `time.monotonic` of the reader's machine.
      strategies: how many strategies of all workers it has begun to make.
    """

    resumed_step: int | None = None
    saved_step: int | None = None
    step: int | None = None
    resumed_seconds: float | None = None
    saved_seconds: float | None = None
    strategies: int | None = None

    @property
    def reached_step(self) -> int | None:
        """The furthest of the three."""
        known = (self.resumed_step, self.saved_step, self.step)
        return max((step for step in known if step is not None), default=None)

    def to_json(self) -> str:
        """One line for `parse_progress`, with ages for times: clocks differ."""
        now_seconds = time.monotonic()
        fields = dataclasses.asdict(self)
        for name in ("resumed_seconds", "saved_seconds"):
            if fields[name] is not None:
                fields[name] = now_seconds - fields[name]
        return json.dumps(fields)


class _Notes:
    """What this process has noted. A child that it forks is another process."""

    lock = threading.Lock()
    descriptor: int | None = None
    counts = {"resumed": UNKNOWN, "saved": UNKNOWN, "done": UNKNOWN, **NONE}
    seconds = {"resumed": math.nan, "saved": math.nan}


def _forget() -> None:
    _Notes.lock = threading.Lock()
    _Notes.descriptor = None
    _Notes.counts = {**dict.fromkeys(_Notes.counts, UNKNOWN), **NONE}
    _Notes.seconds = dict.fromkeys(_Notes.seconds, math.nan)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def note_resumed(step: int) -> None:
    """Says that training goes on from `step`; call it before the first step.

    Args:
      step: updates that are done already, at least 0; 0 when nothing was saved.

    Raises:
      ConfigurationError: when it is no Python int from 0 to 2^63 - 1.

    Cost: as `note_step`.
    """
    _note("resumed", step)


def note_saved(step: int) -> None:
    """Says that a checkpoint of `step` is whole, so that a restart would read it.

    Args:
      step: updates that it holds, at least 0.

    Raises:
      ConfigurationError: when it is no Python int from 0 to 2^63 - 1.

    Cost: as `note_step`.
    """
    _note("saved", step)


def note_step(step: int) -> None:
    """Says that `step` updates are done.

    Args:
      step: updates since the training began, at least 0.

    Raises:
      ConfigurationError: when it is no Python int from 0 to 2^63 - 1.

    Cost: 68 bytes written to a file that stays open, some microseconds; nothing when no
    launcher listens. A disk that is full or gone is no error: the launcher knows less.

    >>> note_step(1200)
    """
    _note("done", step)


def note_strategy() -> None:
    """Says that this worker begins to make a strategy, for which it needs all others.

    Cost: as `note_step`.
    """
    _note("strategies", _Notes.counts["strategies"] + 1)


def begin_notes(folder: str, process: int) -> None:
    """The launcher's part: a file in which the process has room, and noted nothing yet.

    Args:
      folder: the launcher's; where the file cannot be made, nothing is said.
      process: the id of the worker, which has just started.
    """
    path = Path(folder, file_name(process))
    first = path.with_suffix(".first")
    with contextlib.suppress(OSError):
        first.write_bytes(_record({**dict.fromkeys(_Notes.counts, UNKNOWN), **NONE}))
        try:
            os.link(first, path)  # never over what the process has noted meanwhile
        finally:
            first.unlink()


def _record(counts: Mapping[str, int], seconds: Sequence[float] = NO_TIMES) -> bytes:
    body = BODY.pack(MARK, *counts.values(), *seconds)
    return body + CHECKSUM.pack(zlib.crc32(body))


def _note(what: str, step: int) -> None:
    if not is_count(step):
        raise ConfigurationError(
            f"a step must be a Python int from 0 to {LARGEST_COUNT}: the updates done "
            f"since the training began. Received: {_shown(step)}. Take int(...) of "
            "an optimizer's `iterations`."
        )
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    with _Notes.lock:
        _Notes.counts[what] = step
        if what in _Notes.seconds:
            _Notes.seconds[what] = time.monotonic()
        record = _record(_Notes.counts, list(_Notes.seconds.values()))
        try:
            if _Notes.descriptor is None:
                path = Path(folder, file_name(os.getpid()))
                # Nothing there can make the training wait.
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
                _Notes.descriptor = os.open(path, flags, 0o600)
            os.pwrite(_Notes.descriptor, record, 0)
        except OSError:
            pass


def _shown(value: object) -> str:
    """`repr`, cut where it is long: Python refuses to write thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    return repr(value)[:100]


def file_name(process: int) -> str:
    """Of the file in which the process with this id notes."""
    return f"{process}.progress"


def read_progress(folder: str, process: int) -> Progress | None:
    """What the process with this id has noted; None: nothing, or nothing of sense.

    Args:
      folder: the launcher's. What is in it may be anything: no link is followed, no
        pipe waited for, and no more read than a record.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(Path(folder, file_name(process)), flags)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        return _parse_record(os.read(descriptor, RECORD_BYTES + 1))
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _parse_record(record: bytes) -> Progress | None:
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
        resumed_seconds=_past(resumed_seconds) if resumed is not None else None,
        saved_seconds=_past(saved_seconds) if saved is not None else None,
        strategies=strategies,
    )


def _past(seconds: float) -> float | None:
    """The time, when it is one at which something can have happened."""
    return seconds if 0 <= seconds <= time.monotonic() else None


def parse_progress(text: bytes) -> Progress | None:
    """The progress in a line of `Progress.to_json`; None where it makes no sense."""
    try:
        found: Any = parse_json(text)
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    names = ("resumed_step", "saved_step", "step", "strategies")
    counts = {name: found.get(name) for name in names}
    if not all(count is None or is_count(count) for count in counts.values()):
        return None
    return Progress(
        **counts,
        resumed_seconds=_time_of(found.get("resumed_seconds")),
        saved_seconds=_time_of(found.get("saved_seconds")),
    )


def _time_of(age_seconds: object) -> float | None:
    now_seconds = time.monotonic()
    if not is_number(age_seconds) or not 0 <= age_seconds <= now_seconds:
        return None
    return now_seconds - age_seconds


# What a worker and whoever starts it agree on: "saved, start me again".


#: Exit code of a worker that was asked to stop, has saved, and would go on from there.
#: EX_TEMPFAIL of BSD's sysexits.h: "the user is invited to retry". Python, shells and
#: signals (128 and above) use it for nothing else.
START_AGAIN = 75
RESTARTS = "TFDP_RESTARTS"


def restarts(environment: Mapping[str, str] | None = None) -> int:
    """How often `tfdp launch` has started this training again; 0 the first time.

    Args:
      environment: variables by name; None takes those of this process.

    Raises:
      ClusterError: when TFDP_RESTARTS is no integer of at least 0.

    >>> restarts({}), restarts({"TFDP_RESTARTS": "2"})
    (0, 2)
    """
    found = present(os.environ if environment is None else environment, RESTARTS)
    return integer(found, RESTARTS, least=0) or 0
