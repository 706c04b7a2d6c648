"""How the hosts of a living group find each other: all at first, later one by one.

All begin at worker 0's door. It waits for all the others, and then everybody knows
everybody's address; or for a group that trains without worker 0, which knocks there
again and again (`LivingHosts`): then worker 0 is one that comes back. Others that come
back are told at the same door who leads.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tfdp._version import __version__
from tfdp.cluster.node_names import unknown_name_seconds
from tfdp.errors import CollectiveError
from tfdp.hosts.dial import HANDSHAKE_SECONDS, dial
from tfdp.hosts.handshake import StrangerError
from tfdp.hosts.listeners import listen, local_address
from tfdp.hosts.living_company import Company
from tfdp.hosts.living_door import Guest
from tfdp.hosts.living_view import parse_answer
from tfdp.hosts.living_wire import PURPOSE, LivingHello, tell_and_close
from tfdp.hosts.messages import checked_integer, raise_if_refused
from tfdp.hosts.wire import has_ended, read_line
from tfdp.hosts.worker_names import name_workers

__all__ = ["Reception", "begin_at_worker_0", "digest", "find_leader"]

RETRY_SECONDS = 0.25
MOST_SEED = 2**63 - 1
SESSION_BYTES = 32


class Reception:
    """Worker 0's part: who has just begun is told where to go.

    Args:
      company: the hosts.
      settings: what all must be set up with alike.
      seed: that others take over; see `tfdp.data.seeds`.
    """

    def __init__(
        self, company: Company, settings: Mapping[str, Any], seed: Sequence[int]
    ):
        self._company, self._settings = company, settings
        self.seed = list(seed)
        self._beginners: dict[int, Guest] = {}
        self._is_open = True
        self._refusal = ""

    def on_start(self, guest: Guest) -> None:
        """A process that has just begun; in the door's thread."""
        company, hello = self._company, guest.hello
        reason = self._why_refused(guest)
        if reason is not None:
            self._refusal = f" {reason}"
            tell_and_close(guest.connection, {"refused": reason})
            return
        with company.changed:
            if self._is_open:
                self._beginners[hello.rank] = guest
                company.changed.notify_all()
                return
            answer = company.view.as_json()
        tell_and_close(guest.connection, {"group": answer, "seed": self.seed})

    def on_lives(self, guest: Guest) -> None:
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
        tell_and_close(guest.connection, {"is_out": not yields})

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
                    raise CollectiveError(self._who_is_missing(others))
                company.changed.wait(RETRY_SECONDS)
                self._drop_ended()
            self._is_open = False
            beginners = list(self._beginners.values())
            begins = not company.view.session
            if begins:
                self._begin(beginners)
            answer = company.view.as_json()
        for guest in beginners:
            tell_and_close(guest.connection, {"group": answer, "seed": self.seed})
        return begins

    def _begin(self, beginners: Sequence[Guest]) -> None:
        view = self._company.view
        view.session = secrets.token_hex(SESSION_BYTES)
        view.members, view.is_in = (0,), True
        for guest in beginners:
            view.addresses[guest.hello.rank] = guest.address

    def _drop_ended(self) -> None:
        for rank, guest in list(self._beginners.items()):
            if has_ended(guest.connection):
                del self._beginners[rank]

    def _why_refused(self, guest: Guest) -> str | None:
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

    def _who_is_missing(self, others: set[int]) -> str:
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
    company: Company, settings: Mapping[str, Any]
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
        hello = LivingHello(
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
                seed = _ask_for_group(company, words, deadline)
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


def _ask_for_group(company: Company, words: Any, deadline: float) -> list[int]:
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


def _nobody_there(company: Company, error: Exception) -> str:
    host, port = company.coordinator
    return (
        f"Worker {company.rank} found no worker 0 of its job at {host}:{port}: "
        f"{error}. Start worker 0 with the same settings (min_hosts as well) and the "
        "same TFDP_JOB_KEY; check the address and the firewall. While worker 0 "
        "is away nobody can come in."
    )


def find_leader(company: Company) -> int | None:
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
