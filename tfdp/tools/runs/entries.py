"""The entries of a run's file, with a check for each field."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from tfdp.checks import is_number
from tfdp.files.checked_json import is_count
from tfdp.tools.runs.lines import KIND, VERSION, number_of

MOST_TEXT, MOST_NAMES = 1000, 200
# Thirty thousand years: sums of this many stay finite.
MOST_SECONDS = 1e12
MOST_WORKERS = 2**20


@dataclasses.dataclass(frozen=True)
class Start:
    """A process began to train."""

    session: str  # the same for all workers that began together
    worker: int
    workers: int
    replicas: int  # of all workers
    host: str
    began_seconds: float  # since 1970, by the host's clock
    steps_per_epoch: int | None  # None: unknown to Keras
    restarts: int  # by `tfdp launch`
    hosts: tuple[str, ...]  # of all workers, by rank; empty: unknown
    settings: Mapping[str, str]
    versions: Mapping[str, str]
    machine: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """Consecutive steps of one worker; None in a field: unknown."""

    session: str
    step: int  # steps of this process up to the last of these
    steps: int  # number of these steps
    epoch: int  # of the last step, from 0
    batch: int  # of the last step, from 1
    at_seconds: float  # end of the last step, since the start
    seconds: float  # from the end of the step before them, in total
    step_seconds: float  # of `seconds`, within steps
    validation_seconds: float  # of `seconds`, in validation
    longest_seconds: float  # of one step, from the end of the one before
    input_seconds: float | None = None  # that steps waited for batches
    exchange_seconds: float | None = None  # between hosts, waiting included
    samples: int | None = None  # of this worker
    within_bytes: int | None = None  # sent between this worker's replicas
    between_bytes: int | None = None  # sent to other workers
    resident_bytes: int | None = None  # of the process, at the end
    peak_bytes: int | None = None  # of the process, so far
    device_bytes: int | None = None  # of the fullest GPU, at the end
    device_peak_bytes: int | None = None  # of the fullest GPU, so far
    loss: float | None = None  # as Keras reports it: the mean over the epoch so far


@dataclasses.dataclass(frozen=True)
class Epoch:
    """An epoch ended."""

    session: str
    epoch: int  # from 0
    step: int  # steps of this process so far
    at_seconds: float  # since the start
    validation_seconds: float  # within the epoch
    logs: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class End:
    """The training ended normally."""

    session: str
    step: int  # steps of this process so far
    at_seconds: float  # since the start


@dataclasses.dataclass(frozen=True)
class Said:
    """`callbacks.Stragglers` named a slow worker."""

    session: str
    step: int  # from 0
    text: str


Entry = Start | Steps | Epoch | End | Said
KINDS: dict[str, type[Any]] = dict(
    start=Start, steps=Steps, epoch=Epoch, end=End, said=Said
)


def content_from(entry: Entry) -> dict[str, Any]:
    """An entry as the content of a line, without unknown values."""
    kind = next(name for name, each in KINDS.items() if type(entry) is each)
    head = {"kind": kind}
    if kind == "start":
        head |= {"format": KIND, "version": VERSION}  # type: ignore[dict-item]
    # `asdict` would take longer than all the rest, since it copies.
    names = (field.name for field in dataclasses.fields(entry))
    fields = ((name, getattr(entry, name)) for name in names)
    return {**head, **{name: value for name, value in fields if value is not None}}


def entry_from(content: Mapping[str, Any]) -> Entry | None:
    """Parses a line's content; None: an unknown kind; raises ValueError if invalid."""
    kind = content.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        return None
    if kind == "start":
        if content.get("format") != KIND:
            raise ValueError("it is no file of tfdp.callbacks.RunRecord")
        version = content.get("version")
        if not is_count(version) or version != VERSION:
            raise ValueError(f"its version is {version!r:.40}, this reads {VERSION}")
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(KINDS[kind]):
        value = content.get(field.name)
        if value is None and field.name in MAY_BE_UNKNOWN:
            fields[field.name] = None
            continue
        try:
            fields[field.name] = CHECKS[field.name](value)
        except (TypeError, ValueError, OverflowError) as error:
            text = f"its {field.name} means nothing ({error!s:.80})"
            raise ValueError(text) from None
    return KINDS[kind](**fields)  # type: ignore[no-any-return]


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MOST_TEXT:
        raise ValueError(f"no text of at most {MOST_TEXT} characters")
    value.encode()  # raises for lone surrogates, which cannot be written
    return printable(value)


def printable(text: str) -> str:
    """`text` without control characters, which a terminal would execute."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def _whole(least: int, most: int | None = None) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if not is_count(value, least=least) or (most is not None and value > most):
            limit = "on" if most is None else f"to {most}"
            raise ValueError(f"no whole number from {least} {limit}")
        return int(value)

    return check


def _seconds(value: Any) -> float:
    if not is_number(value) or not 0 <= value <= MOST_SECONDS:
        raise ValueError("no time")
    return float(value)


def _number(value: Any) -> float:
    value = number_of(value)
    if not is_number(value):
        raise ValueError("no number")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _mapping(check: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    def checked(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > MOST_NAMES:
            raise ValueError(f"no object of at most {MOST_NAMES} fields")
        return {_text(name): check(each) for name, each in value.items()}

    return checked


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MOST_WORKERS:
        raise ValueError("no list of names")
    return tuple(map(_text, value))


CHECKS: dict[str, Callable[[Any], Any]] = {
    name: check
    for names, check in (
        ("session host text", _text),
        # A table has a row for each of these.
        ("workers replicas", _whole(1, MOST_WORKERS)),
        ("steps steps_per_epoch", _whole(1)),
        ("worker restarts step epoch batch samples", _whole(0)),
        ("within_bytes between_bytes resident_bytes peak_bytes", _whole(0)),
        ("device_bytes device_peak_bytes", _whole(0)),
        ("began_seconds at_seconds seconds step_seconds", _seconds),
        ("validation_seconds longest_seconds", _seconds),
        ("input_seconds exchange_seconds", _seconds),
        ("settings versions machine", _mapping(_text)),
        ("loss", _number),
        ("logs", _mapping(_number)),
        ("hosts", _names),
    )
    for name in names.split()
}
MAY_BE_UNKNOWN = {"steps_per_epoch"} | {
    field.name for field in dataclasses.fields(Steps) if field.default is None
}
