"""Loops of which all workers make as many steps: who ends says so, and where it was.

Whoever ends a loop leaves a note with the number of its last exchange, and waits for
the others' notes. A worker that is in a later exchange by then waits for one that will
not come: that ends the exchange on all of them, with both numbers of steps.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping

from tfdp.errors import CollectiveError, WorkerLostError
from tfdp.hosts.membership import Membership
from tfdp.hosts.messages import checked_integer, checked_text, parse_object, sentence

__all__ = ["StepLoops"]

CHANNEL = "step"
MOST_EXCHANGES = 1 << 63
LONGEST_COUNT_CHARACTERS = 100
# What a loop has made of its steps so far, or is to make of them, in words.
StepsInWords = Callable[[], str]
DIFFERENT = "the workers have different numbers of steps"


class StepLoops:
    """The loops of one worker, which all workers end in the same order.

    Args:
      membership: tells that of this worker, which begins later than this does.
      share_note: everybody's note under a key, by rank; see `HostLink.share_note`.
    """

    def __init__(
        self,
        membership: Callable[[], Membership],
        share_note: Callable[[str, str], dict[int, str]],
    ):
        self._membership = membership
        self._share_note = share_note
        self._ended = 0
        self._open: list[StepsInWords] = []  # what each is to make, outermost first

    @contextlib.contextmanager
    def loop(self, made: StepsInWords, planned: StepsInWords) -> Iterator[None]:
        """See `HostLink.loop_of_steps`."""
        self._open.append(planned)
        try:
            yield
            self._end(made())
        finally:
            self._open.pop()

    def _end(self, steps: str) -> None:
        membership = self._membership()
        position = membership.positions[CHANNEL][membership.rank]
        note = json.dumps({"exchanges": position, "steps": steps})
        try:
            notes = self._share_note(self._key, note)
        except WorkerLostError as error:
            # Nobody is lost: another worker has found that it waits in vain.
            reason = membership.failure or ""
            if reason.startswith(DIFFERENT):
                raise CollectiveError(sentence(reason)) from error
            raise
        self._ended += 1
        counts = {rank: _parsed(note)[1] for rank, note in notes.items()}
        # "2 times 4" steps may be 7: what cannot be compared has met in its exchanges.
        if len(set(counts.values())) > 1 and all(map(str.isdigit, counts.values())):
            raise CollectiveError(sentence(_difference(counts)))

    @property
    def _key(self) -> str:
        return f"end of loop {self._ended}"

    def in_vain(self) -> str | None:
        """Why an exchange of the open loop will not end: another worker's loop has."""
        for planned in self._open[-1:]:
            membership = self._membership()
            # Asked before the notes: later it could be that of the next loop.
            position = membership.positions[CHANNEL][membership.rank]
            for rank, note in membership.notes_under(self._key).items():
                exchanges, theirs = _parsed(note)
                if rank != membership.rank and exchanges < position:
                    return _difference({rank: theirs, membership.rank: planned()})
        return None


def _parsed(note: str) -> tuple[int, str]:
    fields = parse_object(note.encode())
    exchanges = checked_integer(fields.get("exchanges"), 0, MOST_EXCHANGES)
    return exchanges, checked_text(fields.get("steps"), LONGEST_COUNT_CHARACTERS)


def _difference(counts: Mapping[int, str]) -> str:
    has = " and ".join(f"{counts[rank]} on worker {rank}" for rank in sorted(counts))
    return (
        f"{DIFFERENT} in a loop of fit, evaluate or predict: {has}. Give every worker "
        "the same steps_per_epoch (steps of evaluate, validation_steps), and let "
        "callbacks stop training on all workers at the same step"
    )
