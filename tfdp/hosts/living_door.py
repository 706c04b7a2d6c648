"""The door of a host whose group may change: it answers, whatever the host is doing.

A thread lets in who proves the job's secret. Who asks is told what this host knows; who
comes to a meeting, or wants to come in, is kept for whoever leads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfdp.hosts.door import Door
from tfdp.hosts.living_view import View
from tfdp.hosts.living_wire import (
    PURPOSE,
    LivingHello,
    parse_hello,
    tell_and_close,
)
from tfdp.hosts.wire import has_ended

__all__ = ["Guest", "LivingDoor"]

TURN_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Guest:
    """Who was let in, and stays: a host at a meeting, or one that wants to come in.

    Args:
      connection: to it.
      hello: what it said.
      address: of its own door.
    """

    connection: socket.socket
    hello: LivingHello
    address: tuple[str, int]


class LivingDoor:
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
        on_start: Callable[[Guest], None],
        on_lives: Callable[[Guest], None],
    ):
        self._view, self._changed = view, changed
        self._on = {"start": on_start, "lives": on_lives}
        #: Guests by kind ("come", "join") and rank.
        self._guests: dict[tuple[str, int], Guest] = {}
        self._is_closed = False
        self._door = Door(listeners, secret, PURPOSE, parse_hello)
        self._thread = threading.Thread(
            target=self._run, name="tfdp-living-door", daemon=True
        )
        self._thread.start()

    def take(self, kind: str, rank: int) -> Guest | None:
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
                    guest = Guest(connection, hello, (host, hello.port))
                    with contextlib.suppress(OSError, ValueError):
                        self._receive(guest)

    def _receive(self, guest: Guest) -> None:
        hello, view = guest.hello, self._view
        if hello.kind in self._on:
            self._on[hello.kind](guest)
            return
        if hello.kind in ("ask", "drop"):
            tell_and_close(guest.connection, self._answer(hello))
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

    def _answer(self, hello: LivingHello) -> dict[str, Any]:
        with self._changed:
            view = self._view
            is_in = view.is_in and hello.session == view.session
            if hello.kind == "drop" and is_in and hello.rank in view.members:
                # Decided here, under this lock, so that not both drop each other.
                view.is_told_out = True
                self._changed.notify_all()
            return view.as_json()
