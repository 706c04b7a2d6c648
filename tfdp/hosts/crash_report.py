"""What a process died of: for its launcher, and for the workers that wait for it.

A worker that raises takes its peers with it: they fail because of it, and may well end
before it does. So each notes the error that ends it, and whether another worker's end
was the cause. The note goes into the folder that `tfdp launch` names, under the id of
the process; processes that the worker has started have other ids.
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

from tfdp.errors import WorkerLostError
from tfdp.files.atomic import replaced

FOLDER_VARIABLE = "TFDP_LAST_WORDS"
MOST_CHARACTERS = 300
# Lines of TensorFlow's errors: where in the program; which op; what every error says.
FRAME = re.compile(r'( *)(?:File ".*", line \d+|<stack traces unavailable>)')
OP = re.compile(r"\t \[\[.*|\s*\[Op:.*|\{\{\w+ [^{}]*\}\}\s*")
NO_CAUSE = re.compile(r"Hint: |\d+ (?:successful operations|derived errors ignored)\.")
MOST_TRACEBACK_CHARACTERS = 20_000
MOST_BYTES = 200_000


@dataclasses.dataclass(frozen=True)
class CrashReport:
    """Why a process ends.

    Args:
      error: type and message, in one line; of TensorFlow's messages the cause.
      traceback: as Python prints it.
      time_seconds: when, by this machine's clock.
      is_consequence: whether it ends because another worker was lost.
    """

    error: str
    traceback: str
    time_seconds: float
    is_consequence: bool

    def to_json(self) -> str:
        """One line, for `parse_crash_report`."""
        return json.dumps(dataclasses.asdict(self))


class _State:
    said: CrashReport | None = None
    has_lost_another = False
    is_listening = False


def listen() -> None:
    """From now on an error that ends this process is noted."""
    if _State.is_listening:
        return
    _State.is_listening = True
    before = sys.excepthook

    def note(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # Whatever goes wrong here, the error itself must be printed.
        with contextlib.suppress(Exception):
            _State.said = _words_of(error)
            _leave(_State.said)
        before(kind, error, trace)

    sys.excepthook = note


def lost_another() -> None:
    """Notes that a worker was lost: what ends this process now follows from it."""
    _State.has_lost_another = True


def words_of_now() -> CrashReport | None:
    """What ends this process, or is being handled; None: it comes to its end."""
    handled = sys.exc_info()[1]
    if _State.said is None and isinstance(handled, Exception):
        return _words_of(handled)
    return _State.said


def _words_of(error: BaseException) -> CrashReport:
    text = f"{type(error).__name__}: {error}"
    cause = cause_of(str(error)).strip()
    if not cause.startswith(kind := f"{type(error).__name__}: "):
        cause = kind + cause
    trace = "".join(traceback.format_exception(error))
    # TensorFlow puts the text of our error into one of its own.
    names_loss = WorkerLostError.__name__ in text or isinstance(error, WorkerLostError)
    return CrashReport(
        error=" ".join(cause.split())[:MOST_CHARACTERS],
        traceback=trace[-MOST_TRACEBACK_CHARACTERS:],
        time_seconds=time.time(),
        is_consequence=_State.has_lost_another or names_loss,
    )


def cause_of(message: str) -> str:
    """What TensorFlow's message says after its stack; another message as it is.

    >>> cause_of('Graph execution error:\\n  File "a.py", line 3\\n\\nno row 7 [Op:f]')
    'no row 7'
    """
    kept: list[str] = []
    stack_indent: int | None = None
    for line in message.splitlines():
        indent = len(line) - len(line.lstrip())
        if frame := FRAME.match(line):
            # What stood before it introduces it, or is said once more after it.
            kept, stack_indent = [], len(frame[1])
        elif not line.strip():
            stack_indent = None
        elif stack_indent is None or indent <= stack_indent:
            kept.append(line)  # and else it is the line of code
    without_ops = [OP.sub("", line) for line in kept]
    cause = "\n".join(
        line for line in without_ops if line.strip() and not NO_CAUSE.match(line)
    )
    return cause or message


def _leave(words: CrashReport) -> None:
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        with replaced(Path(folder, f"{os.getpid()}.json")) as unfinished:
            unfinished.write_text(words.to_json(), "utf-8")


def read_crash_report(folder: str, process: int) -> CrashReport | None:
    """What the process with this id has left in the folder; None: nothing of sense."""
    try:
        with open(Path(folder, f"{process}.json"), "rb") as file:
            return parse_crash_report(file.read(MOST_BYTES))
    except OSError:
        return None


def parse_crash_report(text: bytes) -> CrashReport | None:
    """The words in a line of `CrashReport.to_json`; None where they make no sense."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, Mapping):
        return None
    values: dict[str, Any] = {
        field.name: found.get(field.name) for field in dataclasses.fields(CrashReport)
    }
    if not all(isinstance(values[name], str) for name in ("error", "traceback")):
        return None
    if not isinstance(values["is_consequence"], bool):
        return None
    if not isinstance(values["time_seconds"], float):
        return None
    return CrashReport(**values)
