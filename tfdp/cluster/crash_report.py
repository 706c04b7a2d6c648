"""Crash reports: why a process ended, for its launcher and for waiting workers.

A worker that fails takes its peers with it, and they may end before it. So each process
reports whether the loss of another worker caused its error. The report goes into the
folder that `tfdp launch` names, under the process id, which separates child processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tfdp import errors
from tfdp.errors import WorkerLostError
from tfdp.files.atomic import replaced

FOLDER_VARIABLE = "TFDP_LAST_WORDS"
MOST_CHARACTERS = 300
# Parts of TensorFlow's messages: stack frames; op names; lines without a cause.
FRAME = re.compile(r'( *)(?:File ".*", line \d+|<stack traces unavailable>)')
OP = re.compile(r"\t \[\[.*|\s*\[Op:.*|\{\{\w+ [^{}]*\}\}\s*")
NO_CAUSE = re.compile(r"Hint: |\d+ (?:successful operations|derived errors ignored)\.")
# An error of tfdp in the text of an error of TensorFlow, up to TensorFlow's own lines.
_OWN_NAMES = "|".join(name for name in errors.__all__ if name.endswith("Error"))
OWN_ERROR = re.compile(
    rf"\b(?:tfdp\.errors\.)?({_OWN_NAMES})"
    r": (.+?)(?=\n\s*(?:Traceback \(|\[\[|\n)|\s*\[Op:|\Z)",
    re.DOTALL,
)
#: Set to 1: errors of tfdp are printed with all frames of TensorFlow and Keras.
WHOLE = "TFDP_WHOLE_TRACEBACKS"
MOST_FRAMES = 3
MOST_TRACEBACK_CHARACTERS = 20_000
MOST_BYTES = 200_000


@dataclasses.dataclass(frozen=True)
class CrashReport:
    """The error that ended a process."""

    error: str  # type and message in one line; of TensorFlow's messages the cause
    traceback: str
    time_seconds: float
    is_consequence: bool  # whether the loss of another worker caused it

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


class _State:
    report: CrashReport | None = None
    has_lost_another = False
    is_listening = False


def listen() -> None:
    """Installs an exception hook that writes the crash report."""
    if _State.is_listening:
        return
    _State.is_listening = True
    before = sys.excepthook

    def note(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # The error itself must be printed even if the report fails.
        short = None
        with contextlib.suppress(Exception):
            _State.report = _report_of(error)
            _leave(_State.report)
            # Another hook, such as a debugger's, gets the error itself.
            if before is sys.__excepthook__ and os.environ.get(WHOLE) != "1":
                short = short_traceback(error)
        if short is None:
            before(kind, error, trace)
        else:
            sys.stderr.write(short)
            sys.stderr.flush()

    sys.excepthook = note


def note_lost_worker() -> None:
    """Records that a worker was lost: a later error is a consequence of that."""
    _State.has_lost_another = True


def current_report() -> CrashReport | None:
    """The report of the error that ends this process or is being handled, if any."""
    handled = sys.exc_info()[1]
    if _State.report is None and isinstance(handled, Exception):
        return _report_of(handled)
    return _State.report


def _report_of(error: BaseException) -> CrashReport:
    text = f"{type(error).__name__}: {error}"
    cause = cause_of(str(error)).strip()
    if found := _own_error_in(error):
        cause = f"{found[1]}: {found[2]}"
    elif not cause.startswith(kind := f"{type(error).__name__}: "):
        cause = kind + cause
    trace = short_traceback(error) or "".join(traceback.format_exception(error))
    # TensorFlow embeds the text of our error in its own.
    names_loss = WorkerLostError.__name__ in text or isinstance(error, WorkerLostError)
    return CrashReport(
        error=" ".join(cause.split())[:MOST_CHARACTERS],
        traceback=trace[-MOST_TRACEBACK_CHARACTERS:],
        time_seconds=time.time(),
        is_consequence=_State.has_lost_another or names_loss,
    )


def short_traceback(error: BaseException) -> str | None:
    """The program's own frames and the message of an error of tfdp that TensorFlow
    raised as one of its own, with its graph's frames, or that names a lost worker: the
    cause is there. None: it is another error."""
    found = _own_error_in(error)
    name, message = found.groups() if found else (type(error).__name__, str(error))
    if found is None and not isinstance(error, WorkerLostError):
        return None
    inside = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename
        and not os.path.abspath(frame.filename).startswith(inside)
    ]
    return "".join(
        [
            "Traceback (most recent call last):\n",
            *traceback.format_list(frames[-MOST_FRAMES:]),
            f"tfdp.errors.{name}: {message.strip()}\n",
            f"({WHOLE}=1 shows the frames of Keras and TensorFlow.)\n",
        ]
    )


def _own_error_in(error: BaseException) -> re.Match[str] | None:
    """The name and message of an error of tfdp in the text of TensorFlow's."""
    is_of_tensorflow = type(error).__module__.startswith("tensorflow.")
    return OWN_ERROR.search(str(error)) if is_of_tensorflow else None


def cause_of(message: str) -> str:
    """The cause in a TensorFlow message, without its stack; other messages unchanged.

    >>> cause_of('Graph execution error:\\n  File "a.py", line 3\\n\\nno row 7 [Op:f]')
    'no row 7'
    """
    kept: list[str] = []
    stack_indent: int | None = None
    for line in message.splitlines():
        indent = len(line) - len(line.lstrip())
        if frame := FRAME.match(line):
            # Earlier lines introduce the stack, or are repeated after it.
            kept, stack_indent = [], len(frame[1])
        elif not line.strip():
            stack_indent = None
        elif stack_indent is None or indent <= stack_indent:
            kept.append(line)  # else it is a line of source code
    without_ops = [OP.sub("", line) for line in kept]
    cause = "\n".join(
        line for line in without_ops if line.strip() and not NO_CAUSE.match(line)
    )
    return cause or message


def _leave(report: CrashReport) -> None:
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        with replaced(Path(folder, f"{os.getpid()}.json")) as unfinished:
            unfinished.write_text(report.to_json(), "utf-8")


def read_crash_report(folder: str, process: int) -> CrashReport | None:
    """The report that a process left in the folder; None if missing or invalid."""
    try:
        with open(Path(folder, f"{process}.json"), "rb") as file:
            return parse_crash_report(file.read(MOST_BYTES))
    except OSError:
        return None


def parse_crash_report(text: bytes) -> CrashReport | None:
    """Parses a line of `CrashReport.to_json`; None if it is invalid."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, Mapping):
        return None
    kinds = (str, str, float, bool)
    fields = dataclasses.fields(CrashReport)
    values: list[Any] = [found.get(field.name) for field in fields]
    is_valid = all(map(isinstance, values, kinds))
    return CrashReport(*values) if is_valid else None
