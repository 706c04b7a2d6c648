"""The hosts of a group as one of them sees them: alive, dead, or gone on without it."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdp.hosts.elastic_transfers import (
    PURPOSE,
    ElasticHello,
    FailureDetector,
    FoundOutError,
    PeerLostError,
    ask,
    fingerprint_of_arrays,
    parse_hello,
    send_and_close,
)
from tfdp.hosts.elastic_view import (
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
from tfdp.hosts.listener import Listener
from tfdp.hosts.messages import checked_integer
from tfdp.hosts.wire import has_ended


class LeftOutError(FoundOutError):
    """The group goes on without this host."""


class AllReduceDoneError(FoundOutError):
    """Another host has done the meeting that this one holds: so does this one."""

    def __init__(self, answer: Answer):
        super().__init__("done elsewhere")
        self.answer = answer


@dataclasses.dataclass
class Members:
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
    door: ElasticListener | None = None
    port: int = 1

    def hello(self, kind: str, update: int = 0, arrays: Any = ()) -> ElasticHello:
        """What this host says of itself."""
        view = self.view
        return ElasticHello(
            kind=kind,
            rank=self.rank,
            workers=self.workers,
            port=self.port,
            session=view.session,
            epoch=view.epoch,
            update=update,
            terms=fingerprint_of_arrays(arrays),
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
    ) -> FailureDetector:
        """The failure detector of a member; it ends when waiting is vain.

        Args:
          rank: of the member.
          update: of the meeting that this host is in.
          also: further checks, called at each look.

        Its `check` raises:
          PeerLostError: the member is dead or silent.
          LeftOutError: the group went on without this host.
          AllReduceDoneError: the member has done the meeting of `update`.
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
                raise AllReduceDoneError(answer)
            if meaning == GONE:
                raise PeerLostError(rank, "it has begun anew, or was left out")
            return True

        return FailureDetector(rank, self.silence_seconds, look)

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

        patience = FailureDetector(rank, self.silence_seconds, look)
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

    def take_joiners(self) -> list[Peer]:
        """All of them, who are this host's to let in now. Under `changed`."""
        guests = [self.take("join", rank) for rank in self.joiners()]
        return [guest for guest in guests if guest is not None]

    def take(self, kind: str, rank: int) -> Peer | None:
        """See `ElasticListener.take`."""
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


# The door of a host whose group may change: it answers, whatever the host is doing.
#
# A thread lets in who proves the job's secret. Who asks is told what this host knows;
# who comes to a meeting, or wants to come in, is kept for whoever leads.


TURN_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Peer:
    """Who was let in, and stays: a host at a meeting, or one that wants to come in.

    Args:
      connection: to it.
      hello: what it said.
      address: of its own door.
    """

    connection: socket.socket
    hello: ElasticHello
    address: tuple[str, int]


class ElasticListener:
    """Listens, answers, and keeps guests.

    Args:
      listeners: closed with the door.
      secret: of the job.
      view: what this host knows; read and changed under `changed`.
      changed: notified when a guest has come.
      on_start: what to do with a process that has just begun; on worker 0 only.
      on_lives: what a group without this worker 0 is told, by its hello.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        secret: bytes,
        view: View,
        changed: threading.Condition,
        on_start: Callable[[Peer], None],
        on_lives: Callable[[Peer], None],
    ):
        self._view, self._changed = view, changed
        self._on = {"start": on_start, "lives": on_lives}
        #: Guests by kind ("come", "join") and rank.
        self._guests: dict[tuple[str, int], Peer] = {}
        self._is_closed = False
        self._door = Listener(listeners, secret, PURPOSE, parse_hello)
        self._thread = threading.Thread(
            target=self._run, name="tfdp-living-door", daemon=True
        )
        self._thread.start()

    def take(self, kind: str, rank: int) -> Peer | None:
        """The newest guest of that kind and rank, if one is there. Under `changed`."""
        return self._guests.pop((kind, rank), None)

    def joiners(self) -> list[int]:
        """Who wants to come in, and has not left. Under `changed`."""
        waiting = [rank for kind, rank in self._guests if kind == "join"]
        for rank in list(waiting):
            if has_ended(self._guests["join", rank].connection):
                self._guests.pop(("join", rank)).connection.close()
                waiting.remove(rank)
        return sorted(waiting)

    def close(self) -> None:
        """Nobody is answered any more, which says that this host has left."""
        self._is_closed = True
        self._thread.join(4 * TURN_SECONDS)
        with self._changed:
            guests, self._guests = list(self._guests.values()), {}
        for guest in guests:
            guest.connection.close()

    def _run(self) -> None:
        with self._door:
            while not self._is_closed:
                with contextlib.suppress(TimeoutError):
                    until = time.monotonic() + TURN_SECONDS
                    connection, host, hello = self._door.next_worker(until)
                    guest = Peer(connection, hello, (host, hello.port))
                    with contextlib.suppress(OSError, ValueError):
                        self._receive(guest)

    def _receive(self, guest: Peer) -> None:
        hello, view = guest.hello, self._view
        if hello.kind in self._on:
            self._on[hello.kind](guest)
            return
        if hello.kind in ("ask", "drop"):
            send_and_close(guest.connection, self._answer(hello))
            return
        with self._changed:
            is_member = hello.rank in view.members and hello.session == view.session
            if hello.kind == "join" or (is_member and hello.epoch == view.epoch):
                earlier = self._guests.pop((hello.kind, hello.rank), None)
                self._guests[hello.kind, hello.rank] = guest
                self._changed.notify_all()
                if earlier is not None:
                    earlier.connection.close()
                return
        # It will ask, and be told that it is out.
        guest.connection.close()

    def _answer(self, hello: ElasticHello) -> dict[str, Any]:
        with self._changed:
            view = self._view
            is_in = view.is_in and hello.session == view.session
            if hello.kind == "drop" and is_in and hello.rank in view.members:
                # Decided here, under this lock, so that not both drop each other.
                view.is_told_out = True
                self._changed.notify_all()
            return view.as_json()
