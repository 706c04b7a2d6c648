"""How a host comes in: it takes the state of the one that leads, and is a member then.

newcomer                        leader
join, what it wants       ->
                                ends a meeting
                          <-    epoch, members, place; the state
"I am in"                 ->
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from tfdp.hosts.living_company import Company
from tfdp.hosts.living_door import Guest
from tfdp.hosts.living_view import parse_place
from tfdp.hosts.living_wire import (
    Patience,
    PeerLostError,
    Watched,
    knock,
    tell_and_close,
    terms_of_arrays,
)
from tfdp.hosts.messages import raise_if_refused

__all__ = ["give_state", "receive_state", "wait_for_beginners"]

RETRY_SECONDS = 0.25

Say = Callable[[str], None]


def receive_state(
    company: Company,
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

    patience = Patience(leader, company.silence_seconds, look)
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


def wait_for_beginners(company: Company, say: Say) -> list[Guest]:
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


def _wait_for_beginner(company: Company, rank: int) -> Guest:
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


def _patience_with(company: Company, rank: int) -> Patience:
    return Patience(
        rank, company.silence_seconds, lambda: company.ask(rank) is not None
    )


def give_state(
    company: Company, guests: Sequence[Guest], arrays: list[np.ndarray], say: Say
) -> None:
    """Gives the state to all of them, side by side."""
    with concurrent.futures.ThreadPoolExecutor(len(guests)) as threads:
        list(threads.map(lambda guest: _give_one(company, guest, arrays, say), guests))


def _give_one(
    company: Company, guest: Guest, arrays: list[np.ndarray], say: Say
) -> None:
    rank = guest.hello.rank
    if guest.hello.terms != terms_of_arrays(arrays):
        reason = (
            f"Worker {rank} trains another model or another optimizer than worker "
            f"{company.rank}. Give all workers the same."
        )
        tell_and_close(guest.connection, {"refused": reason})
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
