"""How the hosts of a living group find each other: all at first, later one by one.

All begin at worker 0's door. It waits for all the others, and then everybody knows
everybody's address; or for a group that trains without worker 0, which knocks there
again and again (`ElasticHosts`): then worker 0 is one that comes back. Others that come
back are told at the same door who leads.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdp._version import __version__
from tfdp.cluster.addresses import unknown_name_seconds
from tfdp.errors import CollectiveError
from tfdp.hosts.connect import HANDSHAKE_SECONDS, StrangerError, dial
from tfdp.hosts.elastic_membership import Members, Peer
from tfdp.hosts.elastic_transfers import (
    PURPOSE,
    ElasticHello,
    FailureDetector,
    PeerLostError,
    Watched,
    fingerprint_of_arrays,
    knock,
    send_and_close,
)
from tfdp.hosts.elastic_view import parse_answer, parse_place
from tfdp.hosts.listener import listen, local_address
from tfdp.hosts.messages import checked_integer, raise_if_refused
from tfdp.hosts.wire import has_ended, read_line
from tfdp.hosts.worker_names import name_workers

RETRY_SECONDS = 0.25
MOST_SEED = 2**63 - 1
SESSION_BYTES = 32


class StateTransfer:
    """Worker 0's part: who has just begun is told where to go.

    Args:
      company: the hosts.
      settings: what all must be set up with alike.
      seed: that others take over; see `tfdp.data.hosts`.
    """

    def __init__(
        self, company: Members, settings: Mapping[str, Any], seed: Sequence[int]
    ):
        self._company, self._settings = company, settings
        self.seed = list(seed)
        self._beginners: dict[int, Peer] = {}
        self._is_open = True
        self._refusal = ""

    def on_start(self, guest: Peer) -> None:
        """A process that has just begun; in the door's thread."""
        company, hello = self._company, guest.hello
        reason = self._why_refused(guest)
        if reason is not None:
            self._refusal = f" {reason}"
            send_and_close(guest.connection, {"refused": reason})
            return
        with company.changed:
            if self._is_open:
                self._beginners[hello.rank] = guest
                company.changed.notify_all()
                return
            answer = company.view.as_json()
        send_and_close(guest.connection, {"group": answer, "seed": self.seed})

    def on_lives(self, guest: Peer) -> None:
        """The leader of a group without this worker 0; in the door's thread."""
        company, hello = self._company, guest.hello
        with company.changed:
            view = company.view
            yields = True
            if not view.session:
                # This process has just begun: it is one that comes back.
                view.session, view.epoch = hello.session, hello.epoch
                view.addresses[hello.rank] = guest.address
                view.members = (hello.rank,)
            elif hello.session != view.session:
                yields = False
            elif view.is_in and hello.rank not in view.members:
                # Each has gone on without the other. One of them has to come back.
                yields = hello.epoch > view.epoch
                view.is_told_out = view.is_told_out or yields
            elif view.is_in:
                view.is_told_out = True  # it does not know yet
            else:
                view.addresses[hello.rank] = guest.address
            company.changed.notify_all()
        send_and_close(guest.connection, {"is_out": not yields})

    def wait_for_all(self) -> bool:
        """Waits for all to begin; False: a group trains already.

        Raises:
          CollectiveError: not all came in time.
        """
        company = self._company
        deadline = time.monotonic() + company.timeout_seconds
        others = set(range(1, company.workers))
        with company.changed:
            while others - self._beginners.keys() and not company.view.session:
                if time.monotonic() >= deadline:
                    raise CollectiveError(self._missing_workers(others))
                company.changed.wait(RETRY_SECONDS)
                self._drop_ended()
            self._is_open = False
            beginners = list(self._beginners.values())
            begins = not company.view.session
            if begins:
                self._begin(beginners)
            answer = company.view.as_json()
        for guest in beginners:
            send_and_close(guest.connection, {"group": answer, "seed": self.seed})
        return begins

    def _begin(self, beginners: Sequence[Peer]) -> None:
        view = self._company.view
        view.session = secrets.token_hex(SESSION_BYTES)
        view.members, view.is_in = (0,), True
        for guest in beginners:
            view.addresses[guest.hello.rank] = guest.address

    def _drop_ended(self) -> None:
        for rank, guest in list(self._beginners.items()):
            if has_ended(guest.connection):
                del self._beginners[rank]

    def _why_refused(self, guest: Peer) -> str | None:
        company, hello = self._company, guest.hello
        for theirs, mine, words in (
            (hello.workers, company.workers, "workers"),
            (hello.version, __version__, "the tfdp version"),
        ):
            if theirs != mine:
                return (
                    f"Worker {hello.rank} says {words}={theirs}, worker 0 says {mine}. "
                    "Start all workers with the same settings and the same tfdp."
                )
        earlier = self._beginners.get(hello.rank)
        is_taken = self._is_open and earlier and not has_ended(earlier.connection)
        if is_taken or hello.rank == 0:
            return (
                f"Two workers say that they are worker {hello.rank} of "
                f"{company.workers}. Give each process a rank of its own."
            )
        if hello.terms != digest(self._settings):
            return (
                f"Worker {hello.rank} was set up otherwise than worker 0, which has "
                f"{dict(self._settings)}. Give every worker the same."
            )
        return None

    def _missing_workers(self, others: set[int]) -> str:
        missing = sorted(others - self._beginners.keys())
        return (
            f"Not all {self._company.workers} workers came together: "
            f"{name_workers(missing)} did not arrive at worker 0 in time. See their "
            "output; check that they can reach the coordinator's address."
            + self._refusal
        )


def digest(settings: Mapping[str, Any]) -> str:
    """A text that is the same for the same settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def begin_at_worker_0(
    company: Members, settings: Mapping[str, Any]
) -> tuple[socket.socket, list[int]]:
    """Asks worker 0, as soon as it is there, for the group.

    Returns:
      A listening socket for this host's own door, and the seed to take over.

    Raises:
      CollectiveError: nobody was there in time, or this host does not fit.
    """
    deadline = time.monotonic() + company.timeout_seconds
    listeners: list[socket.socket] = []

    def words(connection: socket.socket) -> dict[str, Any]:
        if not listeners:
            listeners.append(listen(local_address(connection)))
            company.port = listeners[0].getsockname()[1]
        hello = ElasticHello(
            "start",
            company.rank,
            company.workers,
            company.port,
            terms=digest(settings),
        )
        return dataclasses.asdict(hello)

    try:
        while True:
            try:
                seed = _request_group(company, words, deadline)
                return listeners[0], seed
            except (OSError, ValueError) as error:
                is_final = isinstance(error, StrangerError | socket.gaierror)
                if is_final or time.monotonic() >= deadline:
                    raise CollectiveError(_nobody_there(company, error)) from error
            time.sleep(RETRY_SECONDS)
    except BaseException:
        for listener in listeners:
            listener.close()
        raise


def _request_group(company: Members, words: Any, deadline: float) -> list[int]:
    """One visit to worker 0's door; returns the seed."""
    address, secret = company.coordinator, company.secret
    names = unknown_name_seconds()
    with dial(
        address, secret, PURPOSE, words, deadline, name_seconds=names
    ) as connection:
        # Worker 0 may have begun later, and waits as long as this one would.
        until = time.monotonic() + company.timeout_seconds + HANDSHAKE_SECONDS
        message = read_line(connection, until)
    raise_if_refused(message)
    answer = parse_answer(message.get("group") or {}, company.workers)
    seed = message.get("seed")
    if not isinstance(seed, list) or len(seed) != 2 or not answer.session:
        raise ValueError("no group")
    with company.changed:
        view = company.view
        view.session, view.epoch = answer.session, answer.epoch
        view.members = answer.members
        view.addresses = dict(answer.addresses)
    return [checked_integer(part, 0, MOST_SEED) for part in seed]


def _nobody_there(company: Members, error: Exception) -> str:
    host, port = company.coordinator
    return (
        f"Worker {company.rank} found no worker 0 of its job at {host}:{port}: "
        f"{error}. Start worker 0 with the same settings (min_hosts as well) and the "
        "same TFDP_JOB_KEY; check the address and the firewall. While worker 0 "
        "is away nobody can come in."
    )


def find_leader(company: Members) -> int | None:
    """Who leads the group now, as a host says that is in it; None: nobody says.

    Notes the addresses that this host is told.
    """
    with company.changed:
        session, known = company.view.session, sorted(company.view.addresses)
    for rank in dict.fromkeys([0, *known]):
        if rank == company.rank:
            continue
        try:
            answer = company.ask(rank)
        except OSError:
            continue
        if answer is None or not answer.is_in or answer.session != session:
            continue
        with company.changed:
            company.view.addresses |= answer.addresses
            company.view.place = answer.place
        if answer.leader is not None and answer.leader != company.rank:
            return answer.leader
    return None


# How a host comes in: it takes the state of the one that leads, and is a member then.
#
# newcomer                        leader
# join, what it wants       ->
#                                 ends a meeting
#                           <-    epoch, members, place; the state
# "I am in"                 ->


Say = Callable[[str], None]


def receive_state(
    company: Members,
    leader: int,
    arrays: Sequence[np.ndarray],
    ended: threading.Event,
) -> list[np.ndarray]:
    """The leader's state, once it has ended a meeting; this host is in then.

    Args:
      company: the hosts.
      leader: who leads, as far as is known.
      arrays: of the shapes and types of what comes.
      ended: set when this host is closed.

    Raises:
      OSError, ValueError: the leader is lost, or another one leads.
      CollectiveError: it trains something else.
    """

    def look() -> bool:
        answer = company.ask(leader)
        if answer is None:
            return False
        if not answer.is_in or answer.leader != leader or ended.is_set():
            raise PeerLostError(leader, "another one leads")
        return True

    patience = FailureDetector(leader, company.silence_seconds, look)
    hello = company.hello("join", arrays=arrays)
    connection = knock(company.address(leader), company.secret, hello)
    wire = Watched(connection, patience.check)
    try:
        message = wire.hear()
        raise_if_refused(message)
        state = [np.empty_like(array) for array in arrays]
        wire.fill(state)
        place = parse_place(message.get("place"))
        company.adopt(message)
        with company.changed:
            company.view.is_in, company.view.is_told_out = True, False
            company.view.place = place
        wire.tell({"in": company.view.epoch})
    finally:
        wire.close()
    return state


def wait_for_beginners(company: Members, say: Say) -> list[Peer]:
    """On worker 0, before the first step: all others, but for those who died."""
    guests = []
    for rank in range(1, company.workers):
        try:
            guests.append(_wait_for_beginner(company, rank))
        except PeerLostError as lost:
            say(f"worker {rank} is lost: {lost.reason}")
    with company.changed:
        view = company.view
        view.epoch += 1
        view.members = (0, *(guest.hello.rank for guest in guests))
        for guest in guests:
            view.addresses[guest.hello.rank] = guest.address
    return guests


def _wait_for_beginner(company: Members, rank: int) -> Peer:
    deadline = time.monotonic() + company.timeout_seconds
    patience = _patience_with(company, rank)
    while True:
        with company.changed:
            if rank in company.joiners():  # those who have left are no longer among
                guest = company.take("join", rank)
                if guest is not None:
                    return guest
            company.changed.wait(RETRY_SECONDS)
        patience.check()
        if time.monotonic() >= deadline:
            raise PeerLostError(
                rank, f"it did not begin in {company.timeout_seconds:g} seconds"
            )


def _patience_with(company: Members, rank: int) -> FailureDetector:
    return FailureDetector(
        rank, company.silence_seconds, lambda: company.ask(rank) is not None
    )


def give_state(
    company: Members, guests: Sequence[Peer], arrays: list[np.ndarray], say: Say
) -> None:
    """Gives the state to all of them, side by side."""
    with concurrent.futures.ThreadPoolExecutor(len(guests)) as threads:
        list(threads.map(lambda guest: _give_one(company, guest, arrays, say), guests))


def _give_one(
    company: Members, guest: Peer, arrays: list[np.ndarray], say: Say
) -> None:
    rank = guest.hello.rank
    if guest.hello.terms != fingerprint_of_arrays(arrays):
        reason = (
            f"Worker {rank} trains another model or another optimizer than worker "
            f"{company.rank}. Give all workers the same."
        )
        send_and_close(guest.connection, {"refused": reason})
        say(reason)
        return
    patience = _patience_with(company, rank)
    wire = Watched(guest.connection, patience.check)
    try:
        wire.tell(company.agreement(list(company.view.members)))
        wire.send(*arrays)
        wire.hear()
    except (OSError, ValueError) as error:
        # It comes again, or is missed at the next meeting.
        say(f"worker {rank} did not take the state over: {error}")
    finally:
        wire.close()
