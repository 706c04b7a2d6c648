"""Hosts that train apart and meet now and then, of which some may die and come back.

**Who is present** is agreed at each meeting by those who are alive: it ends with a new
epoch and the ranks of its members (`living_view`). The lowest rank leads; which means
that no host is needed: when the leader dies, the next one leads. Only to come in,
hosts need worker 0's address; while it is away, nobody comes in but worker 0, for whom
the group looks at its address every second.

**A meeting** gives all members the same bits, or is repeated (`living_meeting`).

**Who is dead.** A process that has ended refuses connections: at once. One that gives
no answer for `silence_seconds`, or answers and is `timeout_seconds` late, is left out.
It is told so, or finds out when it asks: it then comes in as a new one does. A host
never goes on without another before it has asked it or waited in vain: the one that is
asked decides, so that not both go on without each other. Hosts that are cut off from
each other, and live, each go on for themselves where `min_hosts` lets them; with more
than half of the hosts as `min_hosts` one part only does. When they find each other
again, those with fewer meetings behind them come in as new ones.

**Who comes in** waits until a meeting is done and takes the state from its leader: all
that training is, in one message of a length that both know beforehand, after the
handshake of `tfdp.hosts.connect`. Nothing is unpickled.

**How long anybody waits**: for a dead process less than a second, for a silent one
`silence_seconds` and some seconds of tries, for a late one `timeout_seconds`; each once
for every host that is lost.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdp.errors import WorkerLostError
from tfdp.hosts.elastic_all_reduce import OuterAllReduce
from tfdp.hosts.elastic_join import (
    StateTransfer,
    begin_at_worker_0,
    find_leader,
    give_state,
    receive_state,
    wait_for_beginners,
)
from tfdp.hosts.elastic_membership import ElasticListener, LeftOutError, Members, Peer
from tfdp.hosts.elastic_transfers import knock
from tfdp.hosts.elastic_view import View
from tfdp.hosts.listener import listen_at
from tfdp.hosts.rendezvous import parse_address
from tfdp.hosts.wire import read_line

# How a meeting ended for this host.
MET, GIVES, LEFT_OUT = 0, 1, 2

KNOCK_SECONDS = 1.0
RETRY_SECONDS = 0.25
Arrays = Sequence[np.ndarray]


def _print(line: str) -> None:
    print(f"tfdp: {line}", file=sys.stderr, flush=True)


class ElasticHosts:
    """This host among those of a group; see the module.

    Args:
      rank, workers: this host, of how many there may be.
      coordinator: "host:port" of worker 0.
      timeout_seconds, silence_seconds, min_hosts: see `Communication`.
      secret: of the job.
      settings: what all must be set up with alike; as JSON can hold it.
      seed: two numbers that others take over from worker 0.
      say: is given lines for people.

    Raises:
      CollectiveError: not all came together in time, or this host does not fit.
    """

    def __init__(
        self,
        rank: int,
        workers: int,
        coordinator: str,
        *,
        timeout_seconds: float,
        silence_seconds: float,
        min_hosts: int = 1,
        secret: bytes = b"",
        settings: Mapping[str, Any] | None = None,
        seed: Sequence[int] = (0, 0),
        say: Callable[[str], None] = _print,
    ):
        self.rank, self.workers = rank, workers
        self._say = say
        self._company = company = Members(
            rank,
            workers,
            secret,
            parse_address(coordinator),
            timeout_seconds,
            silence_seconds,
            min_hosts,
            View(rank),
            threading.Condition(),
        )
        self._to_give: list[Peer] = []
        self._ended = threading.Event()
        self._closing = threading.Lock()
        self._begins = False
        #: The seed of worker 0, or of who has taken it over.
        self.seed = list(seed)
        settings = dict(settings or {})
        self._reception = StateTransfer(company, settings, seed)
        if rank == 0:
            company.port = company.coordinator[1]
            self._open(listen_at(*company.coordinator))
            try:
                self._begins = self._reception.wait_for_all()
            except BaseException:
                self.close()
                raise
        else:
            listener, self.seed = begin_at_worker_0(company, settings)
            self._open([listener])
            threading.Thread(
                target=self._look_for_worker_0, name="tfdp-living-knock", daemon=True
            ).start()
        #: Whether the others trained already when this process began.
        self.comes_back = not self._begins and company.view.epoch > 0

    def _open(self, listeners: Sequence[socket.socket]) -> None:
        company, reception = self._company, self._reception
        company.door = ElasticListener(
            listeners,
            company.secret,
            company.view,
            company.changed,
            reception.on_start,
            reception.on_lives,
        )

    @property
    def present(self) -> tuple[int, ...]:
        """The ranks that took part in the last agreement, and live as far as known."""
        return self._company.view.members

    @property
    def epoch(self) -> int:
        """How many agreements there were, of which this host knows."""
        return self._company.view.epoch

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and batch of this host's `fit`; others take their place from it."""
        return self._company.view.place

    @place.setter
    def place(self, place: tuple[int, int]) -> None:
        self._company.view.place = place

    def place_of_group(self) -> tuple[int, int] | None:
        """Where those are who train already, before this host comes in."""
        leader = find_leader(self._company)
        return None if leader is None else self._company.view.place

    def exchange_state(self, arrays: Arrays) -> list[np.ndarray]:
        """The state with which this host goes on: its own, or that of a live peer.

        To be called before the first step, and before the step after a meeting that
        ended with GIVES or LEFT_OUT.

        Args:
          arrays: this host's state, of the same shapes and types on all hosts.

        Raises:
          WorkerLostError: no group is there for `timeout_seconds`.
          CollectiveError: the hosts train different things.
        """
        mine = [np.asarray(array, order="C") for array in arrays]
        if not self._company.view.is_in:
            return self._enter(mine)
        if self._begins:
            self._begins = False
            self._to_give = wait_for_beginners(self._company, self._say)
        guests, self._to_give = self._to_give, []
        if guests:
            give_state(self._company, guests, mine, self._say)
        return mine

    def meet(self, update: int, arrays: Arrays) -> tuple[list[np.ndarray], int]:
        """The means of arrays over the hosts that are present.

        Args:
          update: after which all meet.
          arrays: floats, of the same shapes and types on all hosts.

        Returns:
          The means, the same bits on all hosts, and MET, GIVES or LEFT_OUT. After
          LEFT_OUT there are no means: what is returned are `arrays`.

        Raises:
          WorkerLostError: fewer than `min_hosts` are left for `timeout_seconds`.
          CollectiveError: the hosts bring different things.

        Cost: for n bytes on H hosts, (H - 1) n bytes to the leader and as many from
        it, n of them of each other host.
        """
        company = self._company
        before = company.view.members
        company.view.at = update
        try:
            meeting = OuterAllReduce(company, update, arrays, self._about(update))
            if company.view.is_told_out:
                raise LeftOutError
            means = meeting.hold()
        except LeftOutError:
            self._leave_group(update)
            return [np.asarray(array) for array in arrays], LEFT_OUT
        finally:
            company.view.at = None
        self._to_give = meeting.joiners
        if company.view.members != before:
            ranks = ", ".join(map(str, company.view.members))
            self._about(update)(f"present are now workers {ranks}")
        return means, GIVES if self._to_give else MET

    def _about(self, update: int) -> Callable[[str], None]:
        return lambda line: self._say(
            f"worker {self.rank}, meeting after update {update}: {line}"
        )

    def _leave_group(self, update: int) -> None:
        company = self._company
        self._about(update)(
            "the others have gone on without this one; it comes in again with their "
            "state"
        )
        with company.changed:
            company.view.is_in = company.view.is_told_out = False
            for guest in company.take_joiners():
                guest.connection.close()  # it looks for who leads now

    def _enter(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        company = self._company
        deadline = time.monotonic() + company.timeout_seconds
        while not self._ended.is_set():
            leader = find_leader(company)
            if leader is not None:
                deadline = time.monotonic() + company.timeout_seconds
                with contextlib.suppress(OSError, ValueError):
                    state = receive_state(company, leader, arrays, self._ended)
                    members = ", ".join(map(str, company.view.members))
                    self._say(
                        f"worker {self.rank} comes in after update "
                        f"{company.view.done} with the state of worker {leader}; "
                        f"present are workers {members}"
                    )
                    return state
            if time.monotonic() >= deadline:
                raise WorkerLostError(
                    f"Worker {self.rank} found no host that trains, to take the state "
                    f"from, for {company.timeout_seconds:g} seconds. See the others' "
                    "output."
                )
            time.sleep(RETRY_SECONDS)
        raise WorkerLostError(f"Worker {self.rank} was closed while it waited.")

    def _look_for_worker_0(self) -> None:
        """While this host leads all others, looks whether a worker 0 has begun anew."""
        company = self._company
        while not self._ended.wait(KNOCK_SECONDS):
            with company.changed:
                view = company.view
                others = [rank for rank in view.members if rank != 0]
                leads = view.is_in and min(others, default=None) == self.rank
            if not leads:
                continue
            try:
                if 0 in view.members:
                    answer = company.ask(0)
                    if answer is None or answer.session:
                        continue
                    company.drop(0)  # another process listens in its place
                with knock(
                    company.coordinator, company.secret, company.hello("lives")
                ) as connection:
                    message = read_line(connection, time.monotonic() + KNOCK_SECONDS)
            except (OSError, ValueError):
                continue
            if message.get("is_out") is True:
                with company.changed:
                    view.is_told_out = True

    def close(self) -> None:
        """Leaves the group: the others go on without this host, at once."""
        with self._closing:
            if self._ended.is_set():
                return
            self._ended.set()
        if self._company.door is not None:
            self._company.door.close()
        for guest in self._to_give:
            guest.connection.close()
