"""Membership of an elastic group, as one host sees it, and the host's listener."""

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
    fingerprint_of_arrays,
    parse_hello,
    query,
    send_and_close,
)
from tfdp.hosts.elastic_view import (
    DONE,
    GONE,
    MOST_COUNT,
    OUT,
    View,
    ViewReply,
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
    """Another host has finished the all-reduce whose means this host has."""

    def __init__(self, answer: ViewReply):
        super().__init__("done elsewhere")
        self.answer = answer


@dataclasses.dataclass
class Members:
    """The state and limits that every phase of an all-reduce needs."""

    rank: int
    workers: int
    secret: bytes
    coordinator: tuple[str, int]  # where worker 0 listens
    timeout_seconds: float  # how late a host may be that answers queries
    silence_seconds: float  # how long a host may give no answer
    min_hosts: int  # no all-reduce finishes with fewer
    view: View
    changed: threading.Condition  # guards `view` and the peers of `listener`
    port: int = 1  # of `listener`
    listener: ElasticListener = dataclasses.field(init=False)

    def hello(self, kind: str, update: int = 0, arrays: Any = ()) -> ElasticHello:
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
        """The address at which that host listens; raises PeerLostError if unknown."""
        if rank == 0:
            return self.coordinator
        with self.changed:
            found = self.view.addresses.get(rank)
        if found is None:
            raise PeerLostError(rank, "its address is unknown")
        return found

    def query(self, rank: int, kind: str = "ask") -> ViewReply | None:
        """The host's reply or None; a ConnectionRefusedError if no process listens."""
        try:
            message = query(self.address(rank), self.secret, self.hello(kind))
            return parse_answer(message, self.workers)
        except ConnectionRefusedError:
            raise
        except (OSError, ValueError):
            return None

    def failure_detector(
        self,
        rank: int,
        update: int | None = None,
        also: Callable[[ViewReply | None], None] = lambda answer: None,
    ) -> FailureDetector:
        """Watches a member in the all-reduce after `update`; `also` gets each reply.

        Its `check` raises PeerLostError if the member is dead or silent, LeftOutError
        if the group went on without this host, AllReduceDoneError if it has finished.
        """

        def look() -> bool:
            if self.view.is_excluded:
                raise LeftOutError
            answer = self.query(rank)
            also(answer)
            if answer is None:
                return False
            meaning = judge(self.view, answer, update)
            if meaning == OUT:
                raise LeftOutError
            if meaning == DONE:
                raise AllReduceDoneError(answer)
            if meaning == GONE:
                raise PeerLostError(rank, "it has restarted, or was left out")
            return True

        return FailureDetector(rank, self.silence_seconds, look)

    def exclude(self, rank: int) -> None:
        """Removes a host that may be alive, once it was notified or is dead.

        Raises LeftOutError if it has gone on without this host before.
        """
        was_reached = False

        def look() -> bool:
            nonlocal was_reached
            answer = self.query(rank, "drop")
            if answer is not None and judge(self.view, answer) == OUT:
                raise LeftOutError
            was_reached = answer is not None
            return was_reached

        detector = FailureDetector(rank, self.silence_seconds, look)
        with contextlib.suppress(PeerLostError):
            while not was_reached:
                detector.check()
        self.drop(rank)

    def drop(self, rank: int) -> None:
        with self.changed:
            self.view.drop(rank)

    def agreement(self, members: list[int]) -> dict[str, Any]:
        """The agreement that ends an all-reduce or a join, for `adopt`."""
        view = self.view
        return {
            "epoch": view.epoch,
            "members": members,
            "addresses": view.as_json()["addresses"],
            "done": view.done,
            "place": list(view.place),
            "is_over": view.is_over,
        }

    def admit(self, peer: Peer) -> None:
        """Makes a host that has the state a member."""
        with self.changed:
            view, rank = self.view, peer.hello.rank
            view.addresses[rank] = peer.address
            view.members = tuple(sorted({*view.members, rank}))

    def adopt(self, message: Mapping[str, Any]) -> None:
        """Takes over another host's agreement; raises ValueError if it is invalid."""
        epoch = checked_integer(message.get("epoch"), 0, MOST_COUNT)
        done = checked_integer(message.get("done"), 0, MOST_COUNT)
        members = parse_members(message.get("members"), self.workers)
        addresses = parse_addresses(message.get("addresses"), self.workers)
        self.take_over(epoch, done, members, addresses)
        self.view.is_over = self.view.is_over or message.get("is_over") is True

    def take_over(
        self,
        epoch: int,
        done: int,
        members: tuple[int, ...],
        addresses: Mapping[int, tuple[str, int]],
    ) -> None:
        with self.changed:
            view = self.view
            view.epoch, view.done, view.members = epoch, done, members
            view.addresses |= addresses


TURN_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Peer:
    """A host that has connected for an all-reduce or to join; `address`: it listens."""

    connection: socket.socket
    hello: ElasticHello
    address: tuple[str, int]


class ElasticListener:
    """Answers other hosts from a thread; keeps hosts that come or join for `take`.

    Closes `listeners`; notifies `changed` when a host is kept. On worker 0, `on_start`
    handles new processes, `on_lives` the leader of a group without worker 0.
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
        self._peers: dict[tuple[str, int], Peer] = {}  # by kind ("come", "join"), rank
        self._is_closed = False
        #: Whether hosts of any epoch may come; the caller of `take` checks them.
        self.keeps_late = False
        self._listener = Listener(listeners, secret, PURPOSE, parse_hello)
        name = "tfdp-elastic-listener"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def take(self, kind: str, rank: int) -> Peer | None:
        """Removes and returns a peer of that kind, or None. Under `changed`."""
        return self._peers.pop((kind, rank), None)

    def joiners(self) -> list[int]:
        """The ranks that wait to join and are still connected. Under `changed`."""
        waiting = [rank for kind, rank in self._peers if kind == "join"]
        for rank in list(waiting):
            if has_ended(self._peers["join", rank].connection):
                self._peers.pop(("join", rank)).connection.close()
                waiting.remove(rank)
        return sorted(waiting)

    def take_joiners(self) -> list[Peer]:
        return [self._peers.pop(("join", rank)) for rank in self.joiners()]

    def close(self) -> None:
        """Stops answering, which shows that this host has left."""
        self._is_closed = True
        self._thread.join(4 * TURN_SECONDS)
        with self._changed:
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.connection.close()

    def _run(self) -> None:
        with self._listener:
            while not self._is_closed:
                with contextlib.suppress(TimeoutError):
                    until = time.monotonic() + TURN_SECONDS
                    connection, host, hello = self._listener.next_worker(until)
                    peer = Peer(connection, hello, (host, hello.port))
                    with contextlib.suppress(OSError, ValueError):
                        self._receive(peer)

    def _receive(self, peer: Peer) -> None:
        hello, view = peer.hello, self._view
        if hello.kind in self._on:
            self._on[hello.kind](peer)
            return
        if hello.kind in ("ask", "drop"):
            send_and_close(peer.connection, self._answer(hello))
            return
        with self._changed:
            is_of_group = hello.session == view.session
            is_member = hello.rank in view.members and is_of_group
            may_come = (is_member and hello.epoch == view.epoch) or (
                self.keeps_late and is_of_group
            )
            if hello.kind == "join" or may_come:
                earlier = self._peers.pop((hello.kind, hello.rank), None)
                self._peers[hello.kind, hello.rank] = peer
                self._changed.notify_all()
                if earlier is not None:
                    earlier.connection.close()
                return
        # Its next query shows that it has been left out.
        peer.connection.close()

    def _answer(self, hello: ElasticHello) -> dict[str, Any]:
        with self._changed:
            view = self._view
            is_in = view.is_in and hello.session == view.session
            if hello.kind == "drop" and is_in and hello.rank in view.members:
                # Decided under this lock, so that two hosts cannot drop each other.
                view.is_excluded = True
                self._changed.notify_all()
            return view.as_json()
