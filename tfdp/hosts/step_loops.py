"""Loops of steps that all workers run in the same order, with as many steps in each.

A worker that starts a loop leaves a note with the loop's name, and waits for the notes
of the others; so does a worker that ends one, with its number of steps. Where the notes
tell of different loops, all workers raise the same error at once. A worker that is in a
later exchange than the one after which another left its note waits in vain: that ends
the exchange on all of them, and the error says what each one does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping

from tfdp.errors import CollectiveError, WorkerLostError
from tfdp.hosts.host_link import NOTHING_TO_COMPARE, Compared
from tfdp.hosts.membership import END_OF_SCRIPT, Membership
from tfdp.hosts.messages import checked_integer, checked_text, parse_object, sentence
from tfdp.hosts.worker_names import name_workers

# Exchanges of these come in the program's order; notes of a loop say how far each is.
CHANNELS = ("step", "host")
MOST_EXCHANGES = 1 << 63
LONGEST_COUNT_CHARACTERS = 100
LONGEST_TEXT_CHARACTERS = 1000
# What a loop has made of its steps so far, or is to make of them, in words.
StepsInWords = Callable[[], str]
DIFFERENT = "the workers have different numbers of steps"
SAME_ORDER = (
    "every worker must call fit, evaluate and predict in the same order "
    "(docs/what-every-worker-must-call.md)"
)


@dataclasses.dataclass(frozen=True)
class _Loop:
    name: str
    made: StepsInWords
    planned: StepsInWords


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a worker was when it started or ended a loop.

    Args:
      event: "started epoch 2 of fit (dataset 0)".
      exchanges: by channel, the number of its last exchange.
      begun: how many steps of the loop around this one it had begun.
      steps: how many steps the loop that ended has made, in words; "" at a start.
      digest: of what all workers must have in common there; "" for nothing.
    """

    event: str
    exchanges: dict[str, int]
    begun: int
    steps: str = ""
    digest: str = ""

    @classmethod
    def from_note(cls, note: str) -> _Place:
        """The place that a note of another worker tells.

        Raises:
          ValueError: it tells none.
        """
        fields = parse_object(note.encode())
        exchanges = parse_object(json.dumps(fields.get("exchanges")).encode())
        return cls(
            checked_text(fields.get("event"), LONGEST_TEXT_CHARACTERS),
            {
                channel: checked_integer(exchanges.get(channel), 0, MOST_EXCHANGES)
                for channel in CHANNELS
            },
            checked_integer(fields.get("begun"), 0, MOST_EXCHANGES),
            checked_text(fields.get("steps"), LONGEST_COUNT_CHARACTERS),
            checked_text(fields.get("digest"), LONGEST_TEXT_CHARACTERS),
        )


class StepLoops:
    """The loops of one worker, which all workers start and end in the same order.

    Args:
      membership: tells how far this worker is, and what the others have left.
      share_note: everybody's note under a key, by rank; see `HostLink.share_note`.
    """

    def __init__(
        self,
        membership: Membership,
        share_note: Callable[[str, str], dict[int, str]],
    ):
        self._membership = membership
        self._share_note = share_note
        self._places = 0  # how many starts and ends all workers have come to
        self._is_at_place = False
        self._last_event = "made its strategy"
        self._open: list[_Loop] = []  # outermost first

    def start(self, call: str, *, only_within_a_loop: bool) -> None:
        """See `HostLink.start`."""
        if only_within_a_loop and not self._open:
            return
        self._come_to(f"started {call}", NOTHING_TO_COMPARE, is_end=False)

    @contextlib.contextmanager
    def loop(
        self,
        made: StepsInWords,
        planned: StepsInWords,
        name: str,
        compared: Compared = NOTHING_TO_COMPARE,
    ) -> Iterator[None]:
        """See `HostLink.loop_of_steps`."""
        self._come_to(f"started {name}", compared, is_end=False)
        self._open.append(_Loop(name, made, planned))
        try:
            yield
            self._come_to(f"ended {name}", compared, is_end=True, steps=made())
        finally:
            self._open.pop()

    def _come_to(
        self, event: str, compared: Compared, *, is_end: bool, steps: str = ""
    ) -> None:
        digest = compared.digest(is_end=is_end)
        membership = self._membership
        exchanges = {
            channel: membership.positions[channel][membership.rank]
            for channel in CHANNELS
        }
        mine = _Place(event, exchanges, self._begun, steps, digest)
        self._is_at_place = True
        try:
            notes = self._share_note(self._key, json.dumps(dataclasses.asdict(mine)))
            self._places += 1
            self._last_event = event
        except WorkerLostError as error:
            raise self._explained(error, event) from error
        finally:
            self._is_at_place = False
        places = {rank: _place_of(rank, note) for rank, note in notes.items()}
        if len({place.event for place in places.values()}) > 1:
            raise CollectiveError(sentence(_other_order(places)))
        counts = {rank: place.steps for rank, place in places.items()}
        # "2 times 4" steps may be 7: what cannot be compared has met in its exchanges.
        if len(set(counts.values())) > 1 and all(map(str.isdigit, counts.values())):
            raise CollectiveError(sentence(_difference(counts)))
        if len({place.digest for place in places.values()}) > 1:
            compared.explain(is_end=is_end)

    def _explained(self, error: WorkerLostError, event: str) -> CollectiveError:
        """`error`, which ended the wait for the others, with its cause if known."""
        membership = self._membership
        reason = membership.failure or ""
        if DIFFERENT in reason or SAME_ORDER in reason:
            # Nobody is lost: another worker has found that it waits in vain.
            return CollectiveError(sentence(reason))
        left = membership.wait_for_news(0.0) or ""
        if not reason and left.endswith(END_OF_SCRIPT):
            me = f"worker {membership.rank}"
            return CollectiveError(sentence(f"{left} while {me} {event}; {SAME_ORDER}"))
        return WorkerLostError(f"Worker {membership.rank} {event}. {error}")

    @property
    def _key(self) -> str:
        return f"start or end {self._places} of a loop of fit, evaluate or predict"

    @property
    def _begun(self) -> int:
        """How many steps of the innermost open loop were begun."""
        return int(self._open[-1].made().split()[0]) if self._open else 0

    def in_vain(self) -> str | None:
        """Why an exchange of this worker will not end: another one is elsewhere."""
        if self._is_at_place:
            return None  # the notes of all workers will tell
        membership = self._membership
        # Asked before the notes: later it could be that behind the next place.
        key, begun = self._key, self._begun
        mine = {name: membership.positions[name][membership.rank] for name in CHANNELS}
        for rank, note in membership.notes_under(key).items():
            try:
                theirs = _place_of(rank, note)
            except CollectiveError as error:
                return str(error).rstrip(".")
            is_start = not theirs.steps
            is_behind = any(theirs.exchanges[name] < mine[name] for name in CHANNELS)
            # Not at an end: whoever does not know the number of its steps begins one
            # more, which finds the end of the input.
            if rank != membership.rank and (
                is_behind or (is_start and theirs.begun < begun)
            ):
                return self._why_in_vain(rank, theirs, membership.rank)
        return None

    def _why_in_vain(self, rank: int, theirs: _Place, own_rank: int) -> str:
        loop = self._open[-1] if self._open else None
        if loop is not None and theirs.event == f"ended {loop.name}":
            return _difference({rank: theirs.steps, own_rank: loop.planned()})
        where = loop.name if loop else f"an exchange after it {self._last_event}"
        return (
            f"worker {rank} {theirs.event} while worker {own_rank} was in {where}; "
            f"{SAME_ORDER}"
        )


def _place_of(rank: int, note: str) -> _Place:
    try:
        return _Place.from_note(note)
    except ValueError as error:
        raise CollectiveError(
            f"Worker {rank} left a note that no worker leaves ({error}). Give every "
            "worker the same version of tfdp."
        ) from error


def _other_order(places: Mapping[int, _Place]) -> str:
    by_event: dict[str, list[int]] = {}
    for rank in sorted(places):
        by_event.setdefault(places[rank].event, []).append(rank)
    did = " while ".join(
        f"{name_workers(ranks)} {event}" for event, ranks in by_event.items()
    )
    return f"{did}; {SAME_ORDER}"


def _difference(counts: Mapping[int, str]) -> str:
    has = " and ".join(f"{counts[rank]} on worker {rank}" for rank in sorted(counts))
    return (
        f"{DIFFERENT} in a loop of fit, evaluate or predict: {has}. Give every worker "
        "the same steps_per_epoch (steps of evaluate, validation_steps), and let "
        "callbacks stop training on all workers at the same step"
    )
