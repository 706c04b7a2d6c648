"""What stands in a run's file, as values that were checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tfdp.checks import is_number
from tfdp.files.checked_json import is_count
from tfdp.tools.runs.lines import KIND, VERSION, number_of

MOST_TEXT, MOST_NAMES = 1000, 200
# Thirty thousand years: a sum of so many is finite still.
MOST_SECONDS = 1e12
MOST_WORKERS = 2**20


@dataclasses.dataclass(frozen=True)
class Start:
    """A process has begun to train.

    Args:
      session: the same word for all workers that began together.
      worker, workers: this one, of how many.
      replicas: of all workers.
      host: the name of its machine.
      began_seconds: when, since 1970, by that machine's clock.
      steps_per_epoch: None: Keras did not know.
      restarts: how often `tfdp launch` had started the training again.
      hosts: the machines of all workers, by rank; empty: not known.
      settings, versions, machine: what it was, in words.
    """

    session: str
    worker: int
    workers: int
    replicas: int
    host: str
    began_seconds: float
    steps_per_epoch: int | None
    restarts: int
    hosts: tuple[str, ...]
    settings: Mapping[str, str]
    versions: Mapping[str, str]
    machine: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """Steps of one worker, one after the other.

    Args:
      session: of its start.
      step: how many this process had made with them.
      steps: how many they are.
      epoch, batch: of the last of them; the epoch from 0, the batch from 1.
      at_seconds: when it ended, since the start.
      seconds: from the end of the step before them to their end, all together.
      step_seconds: of these, those within steps.
      validation_seconds: of these, those of validation.
      longest_seconds: of the step that took longest, from the end of the one before.
      input_seconds: that steps waited for their batches; None: not known.
      exchange_seconds: in exchanges with other workers, the waiting for them included;
        None: not known.
      samples: of this worker; None: not known.
      within_bytes, between_bytes: that this worker's replicas sent to each other, and
        it to other workers; None: nobody counted.
      resident_bytes, peak_bytes: memory of the process at the end, and its most so
        far; None: not asked for, or the system does not tell.
      device_bytes, device_peak_bytes: the same of the fullest GPU; None: there is none.
      loss: as Keras reports it, the mean over the epoch so far; None: there is none.
    """

    session: str
    step: int
    steps: int
    epoch: int
    batch: int
    at_seconds: float
    seconds: float
    step_seconds: float
    validation_seconds: float
    longest_seconds: float
    input_seconds: float | None = None
    exchange_seconds: float | None = None
    samples: int | None = None
    within_bytes: int | None = None
    between_bytes: int | None = None
    resident_bytes: int | None = None
    peak_bytes: int | None = None
    device_bytes: int | None = None
    device_peak_bytes: int | None = None
    loss: float | None = None

    @property
    def between_seconds(self) -> float:
        """Between steps, without validation: what Keras and callbacks did."""
        return max(0.0, self.seconds - self.step_seconds - self.validation_seconds)


@dataclasses.dataclass(frozen=True)
class Epoch:
    """An epoch has ended.

    Args:
      session: of its start.
      epoch: from 0.
      step: how many steps this process had made.
      at_seconds: when, since the start.
      validation_seconds: of the validation in it.
      logs: what Keras reports of it.
    """

    session: str
    epoch: int
    step: int
    at_seconds: float
    validation_seconds: float
    logs: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class End:
    """The training has ended as it should.

    Args:
      session: of its start.
      step: how many steps this process had made.
      at_seconds: when, since the start.
    """

    session: str
    step: int
    at_seconds: float


Entry = Start | Steps | Epoch | End
KINDS: dict[str, type[Any]] = {
    "start": Start,
    "steps": Steps,
    "epoch": Epoch,
    "end": End,
}


def content_from(entry: Entry) -> dict[str, Any]:
    """What the line of an entry says; values that are not known are left out."""
    kind = next(name for name, each in KINDS.items() if type(entry) is each)
    head = {"kind": kind}
    if kind == "start":
        head |= {"format": KIND, "version": VERSION}  # type: ignore[dict-item]
    # Not by `asdict`, which copies, and takes longer than all else.
    names = (field.name for field in dataclasses.fields(entry))
    fields = ((name, getattr(entry, name)) for name in names)
    return {**head, **{name: value for name, value in fields if value is not None}}


def entry_from(content: Mapping[str, Any]) -> Entry | None:
    """The entry that a line's content means; None: of a kind that is not known.

    Raises:
      ValueError: a field is missing or means nothing, or it is another version's.
    """
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
            raise ValueError(
                f"its {field.name} means nothing ({error!s:.80})"
            ) from None
    return KINDS[kind](**fields)  # type: ignore[no-any-return]


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MOST_TEXT:
        raise ValueError(f"no text of at most {MOST_TEXT} characters")
    value.encode()  # half a surrogate cannot be written
    # Terminals obey some characters that cannot be printed.
    return "".join(sign if sign.isprintable() else " " for sign in value)


def _count(value: Any) -> int:
    if not is_count(value):
        raise ValueError("no whole number from 0 on")
    return int(value)


def _from_one(value: Any) -> int:
    if not is_count(value, least=1):
        raise ValueError("no whole number from 1 on")
    return int(value)


def _listed(value: Any) -> int:
    """Things of which a table has a row for each."""
    if _from_one(value) > MOST_WORKERS:
        raise ValueError(f"no whole number from 1 to {MOST_WORKERS}")
    return int(value)


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


def _texts(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > MOST_NAMES:
        raise ValueError(f"no object of at most {MOST_NAMES} fields")
    return {_text(name): _text(each) for name, each in value.items()}


def _numbers(value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or len(value) > MOST_NAMES:
        raise ValueError(f"no object of at most {MOST_NAMES} fields")
    return {_text(name): _number(each) for name, each in value.items()}


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MOST_WORKERS:
        raise ValueError("no list of names")
    return tuple(map(_text, value))


CHECKS: dict[str, Any] = {
    **dict.fromkeys(("session", "host"), _text),
    **dict.fromkeys(("workers", "replicas"), _listed),
    **dict.fromkeys(("steps", "steps_per_epoch"), _from_one),
    **dict.fromkeys(("worker", "restarts", "step", "epoch", "batch"), _count),
    **dict.fromkeys(("samples", "within_bytes", "between_bytes"), _count),
    **dict.fromkeys(("resident_bytes", "peak_bytes"), _count),
    **dict.fromkeys(("device_bytes", "device_peak_bytes"), _count),
    **dict.fromkeys(("began_seconds", "at_seconds", "seconds"), _seconds),
    **dict.fromkeys(("step_seconds", "validation_seconds"), _seconds),
    **dict.fromkeys(("longest_seconds", "input_seconds"), _seconds),
    **dict.fromkeys(("exchange_seconds",), _seconds),
    **dict.fromkeys(("settings", "versions", "machine"), _texts),
    "loss": _number,
    "logs": _numbers,
    "hosts": _names,
}
MAY_BE_UNKNOWN = {
    *("steps_per_epoch", "input_seconds", "exchange_seconds", "samples", "loss"),
    *("within_bytes", "between_bytes", "resident_bytes", "peak_bytes"),
    *("device_bytes", "device_peak_bytes"),
}
