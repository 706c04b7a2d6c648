"""The hosts of a group as one of them sees them: alive, dead, or gone on without it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

from tfdp.hosts.living_door import Guest, LivingDoor
from tfdp.hosts.living_view import (
    DONE,
    GONE,
    MOST_COUNT,
    OUT,
    Answer,
    View,
    judge,
    parse_addresses,
    parse_answer,
    parse_members,
)
from tfdp.hosts.living_wire import (
    FoundOutError,
    LivingHello,
    Patience,
    PeerLostError,
    ask,
    terms_of_arrays,
)
from tfdp.hosts.messages import checked_integer

__all__ = ["Company", "LeftOutError", "MeetingDoneError"]


class LeftOutError(FoundOutError):
    """The group goes on without this host."""


class MeetingDoneError(FoundOutError):
    """Another host has done the meeting that this one holds: so does this one."""

    def __init__(self, answer: Answer):
        super().__init__("done elsewhere")
        self.answer = answer


@dataclasses.dataclass
class Company:
    """What every step of a meeting needs.

    Args:
      rank, workers: this host, of how many there may be.
      secret: of the job.
      coordinator: where worker 0 listens.
      timeout_seconds: how long a host that answers may be late.
      silence_seconds: how long one may give no answer.
      min_hosts: with fewer no meeting ends.
      view: what this host knows.
      changed: guards `view`, and the door's guests.
      door: this host's.
      port: of it.
    """

    rank: int
    workers: int
    secret: bytes
    coordinator: tuple[str, int]
    timeout_seconds: float
    silence_seconds: float
    min_hosts: int
    view: View
    changed: threading.Condition
    door: LivingDoor | None = None
    port: int = 1

    def hello(self, kind: str, update: int = 0, arrays: Any = ()) -> LivingHello:
        """What this host says of itself."""
        view = self.view
        return LivingHello(
            kind=kind,
            rank=self.rank,
            workers=self.workers,
            port=self.port,
            session=view.session,
            epoch=view.epoch,
            update=update,
            terms=terms_of_arrays(arrays),
        )

    def address(self, rank: int) -> tuple[str, int]:
        """Where that host listens.

        Raises:
          PeerLostError: nobody has said.
        """
        if rank == 0:
            return self.coordinator
        with self.changed:
            found = self.view.addresses.get(rank)
        if found is None:
            raise PeerLostError(rank, "nobody knows where it is")
        return found

    def ask(self, rank: int, kind: str = "ask") -> Answer | None:
        """What that host says of itself; None: nothing.

        Raises:
          ConnectionRefusedError: no process listens there.
        """
        try:
            message = ask(self.address(rank), self.secret, self.hello(kind))
            return parse_answer(message, self.workers)
        except ConnectionRefusedError:
            raise
        except (OSError, ValueError):
            return None

    def patience(
        self,
        rank: int,
        update: int | None = None,
        also: Callable[[Answer | None], None] = lambda answer: None,
    ) -> Patience:
        """Patience with a member, which ends when waiting makes no sense any more.

        Args:
          rank: of the member.
          update: of the meeting that this host is in.
          also: further checks, called at each look.

        Its `check` raises:
          PeerLostError: the member is dead or silent.
          LeftOutError: the group went on without this host.
          MeetingDoneError: the member has done the meeting of `update`.
        """

        def look() -> bool:
            if self.view.is_told_out:
                raise LeftOutError
            answer = self.ask(rank)
            also(answer)
            if answer is None:
                return False
            meaning = judge(self.view, answer, update)
            if meaning == OUT:
                raise LeftOutError
            if meaning == DONE:
                raise MeetingDoneError(answer)
            if meaning == GONE:
                raise PeerLostError(rank, "it has begun anew, or was left out")
            return True

        return Patience(rank, self.silence_seconds, look)

    def exclude(self, rank: int) -> None:
        """Goes on without a host that may live: it is told, or is dead.

        Raises:
          LeftOutError: it has gone on without this host before.
        """

        is_told = False

        def look() -> bool:
            nonlocal is_told
            answer = self.ask(rank, "drop")
            if answer is not None and judge(self.view, answer) == OUT:
                raise LeftOutError
            is_told = answer is not None
            return is_told

        patience = Patience(rank, self.silence_seconds, look)
        with contextlib.suppress(PeerLostError):
            while not is_told:
                patience.check()
        self.drop(rank)

    def drop(self, rank: int) -> None:
        """Goes on without a host that is dead."""
        with self.changed:
            self.view.drop(rank)

    def joiners(self) -> list[int]:
        """Who waits at this host's door to come in. Under `changed`."""
        return [] if self.door is None else self.door.joiners()

    def take_joiners(self) -> list[Guest]:
        """All of them, who are this host's to let in now. Under `changed`."""
        guests = [self.take("join", rank) for rank in self.joiners()]
        return [guest for guest in guests if guest is not None]

    def take(self, kind: str, rank: int) -> Guest | None:
        """See `LivingDoor.take`."""
        return None if self.door is None else self.door.take(kind, rank)

    def agreement(self, members: list[int]) -> dict[str, Any]:
        """What a meeting, or the entrance of a host, ends with, for `adopt`."""
        view = self.view
        return {
            "epoch": view.epoch,
            "members": members,
            "addresses": view.as_json()["addresses"],
            "done": view.done,
            "place": list(view.place),
        }

    def adopt(self, message: Mapping[str, Any]) -> None:
        """Takes an agreement over.

        Raises:
          ValueError: when it is none.
        """
        epoch = checked_integer(message.get("epoch"), 0, MOST_COUNT)
        done = checked_integer(message.get("done"), 0, MOST_COUNT)
        members = parse_members(message.get("members"), self.workers)
        addresses = parse_addresses(message.get("addresses"), self.workers)
        self.take_over(epoch, done, members, addresses)

    def take_over(
        self,
        epoch: int,
        done: int,
        members: tuple[int, ...],
        addresses: Mapping[int, tuple[str, int]],
    ) -> None:
        """What another host has agreed to is agreed to here, too."""
        with self.changed:
            view = self.view
            view.epoch, view.done, view.members = epoch, done, members
            view.addresses |= addresses
