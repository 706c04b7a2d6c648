"""Checks that all workers run the same loops with the same numbers of steps.

A worker that starts or ends a loop leaves a note (with its number of steps at the end)
and waits for all notes. If they differ, all workers raise the same error. A worker in a
later exchange than the one after which another left its note would wait forever: the
membership thread then ends that exchange on all workers, with an explanation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from tfdp.cluster.worker_names import name_workers
from tfdp.errors import CollectiveError, WorkerLostError
from tfdp.hosts.host_link import NOTHING_TO_COMPARE, Compared
from tfdp.hosts.membership import END_OF_SCRIPT, Membership
from tfdp.hosts.messages import checked_integer, checked_text, parse_object, sentence

# Channels whose exchanges follow the program's order; and those of exchanges that the
# program begins in its order, and another thread runs later.
CHANNELS = ("step", "host")
LATER = ("late",)
MOST_EXCHANGES = 1 << 63
LONGEST_COUNT_CHARACTERS = 100
LONGEST_TEXT_CHARACTERS = 1000
# Returns how many steps a loop has made or will make, as text.
StepsInWords = Callable[[], str]
DIFFERENT = "the workers have different numbers of steps"
SAME_ORDER = (
    "every worker must call fit, evaluate and predict in the same order "
    "(docs/how-hosts-work.md#what-every-worker-must-call)"
)


@dataclasses.dataclass(frozen=True)
class _Loop:
    name: str
    made: StepsInWords
    planned: StepsInWords


@dataclasses.dataclass(frozen=True)
class _LoopPosition:
    """A worker's position when it started or ended a loop."""

    event: str  # "started epoch 2 of fit (dataset 0)"
    exchanges: dict[str, int]  # by channel, how many the program had begun
    begun: int  # steps of the enclosing loop
    steps: str = ""  # that the ended loop has made, as text; "" at a start
    digest: str = ""  # see `Compared.digest`

    @classmethod
    def from_note(cls, note: str) -> _LoopPosition:
        """Parses another worker's note; raises ValueError."""
        fields = parse_object(note.encode())
        exchanges = parse_object(json.dumps(fields.get("exchanges")).encode())
        return cls(
            checked_text(fields.get("event"), LONGEST_TEXT_CHARACTERS),
            {
                channel: checked_integer(exchanges.get(channel), 0, MOST_EXCHANGES)
                for channel in CHANNELS + LATER
            },
            checked_integer(fields.get("begun"), 0, MOST_EXCHANGES),
            checked_text(fields.get("steps"), LONGEST_COUNT_CHARACTERS),
            checked_text(fields.get("digest"), LONGEST_TEXT_CHARACTERS),
        )


class StepLoops:
    """This worker's loops; `share_note` is that of `HostLink`."""

    def __init__(
        self, membership: Membership, share_note: Callable[[str, str], dict[int, str]]
    ):
        self._membership = membership
        self._share_note = share_note
        self._places = 0  # how many starts and ends all workers have reached
        self._is_at_place = False
        self._last_event = "made its strategy"
        self._open: list[_Loop] = []  # outermost first
        self._announced = dict.fromkeys(LATER, 0)

    def announce(self, exchanges: int, channel: str) -> None:
        """Counts exchanges of one of `LATER`, before the other thread runs them."""
        self._announced[channel] += exchanges

    def start(self, call: str, *, only_within_a_loop: bool) -> None:
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
        exchanges = self._under_way(CHANNELS) | self._announced
        mine = _LoopPosition(event, exchanges, self._begun, steps, digest)
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
        # "2 times 4" steps may be 7: such counts were compared by their exchanges.
        are_digits = all(map(str.isdigit, counts.values()))
        if compared.counts_steps and len(set(counts.values())) > 1 and are_digits:
            raise CollectiveError(sentence(_difference(counts)))
        if len({place.digest for place in places.values()}) > 1:
            compared.explain(is_end=is_end)

    def _explained(self, error: WorkerLostError, event: str) -> CollectiveError:
        """Replaces `error`, which ended a barrier, by its cause if that is known."""
        membership = self._membership
        reason = membership.failure or ""
        if DIFFERENT in reason or SAME_ORDER in reason:
            # No worker is lost: another one has found the difference first.
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
        return int(self._open[-1].made().split()[0]) if self._open else 0

    def _under_way(self, channels: Sequence[str]) -> dict[str, int]:
        """The number of this worker's last exchange in each channel."""
        positions, rank = self._membership.positions, self._membership.rank
        return {channel: positions[channel][rank] for channel in channels}

    def in_vain(self) -> str | None:
        """Why an exchange of this worker will never end: another one is elsewhere."""
        if self._is_at_place:
            return None  # the barrier itself will find the difference
        membership = self._membership
        # Read before the notes: read later, they could belong to the next barrier.
        key, begun = self._key, self._begun
        mine = self._under_way(CHANNELS + LATER)
        for rank, note in membership.notes_under(key).items():
            try:
                theirs = _place_of(rank, note)
            except CollectiveError as error:
                return str(error).rstrip(".")
            is_start = not theirs.steps
            is_behind = any(theirs.exchanges[name] < mine[name] for name in mine)
            # Only at a start: without a known number of steps a worker begins one more,
            # which finds the end of the input.
            if rank != membership.rank and (
                is_behind or (is_start and theirs.begun < begun)
            ):
                return self._why_in_vain(rank, theirs, membership.rank)
        return None

    def _why_in_vain(self, rank: int, theirs: _LoopPosition, own_rank: int) -> str:
        loop = self._open[-1] if self._open else None
        if loop is not None and theirs.event == f"ended {loop.name}":
            return _difference({rank: theirs.steps, own_rank: loop.planned()})
        where = loop.name if loop else f"an exchange after it {self._last_event}"
        return (
            f"worker {rank} {theirs.event} while worker {own_rank} was in {where}; "
            f"{SAME_ORDER}"
        )


def _place_of(rank: int, note: str) -> _LoopPosition:
    try:
        return _LoopPosition.from_note(note)
    except ValueError as error:
        raise CollectiveError(
            f"Worker {rank} left a note that no worker leaves ({error}). Give every "
            "worker the same version of tfdp."
        ) from error


def _other_order(places: Mapping[int, _LoopPosition]) -> str:
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
