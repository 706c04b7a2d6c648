"""A meeting of the living: one adds up, all use the same sum, or meet once more.

    member                          leader, the lowest rank
    come, with its arrays     ->
                                    adds up in the order of ranks, divides
                              <-    the means
    "I hold them"             ->
                                    decides: the meeting is done
                              <-    "done", the members of the next one
    "I use them"              ->

Nobody uses means before all who are alive hold them. When the leader dies the next rank
leads, and the meeting is repeated; where somebody has used the means already, the
others, who hold them, hear of it from that one.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdp.errors import CollectiveError, WorkerLostError
from tfdp.hosts.elastic_membership import (
    AllReduceDoneError,
    LeftOutError,
    Members,
    Peer,
)
from tfdp.hosts.elastic_transfers import (
    FoundOutError,
    PeerLostError,
    Watched,
    fingerprint_of_arrays,
    knock,
)
from tfdp.hosts.elastic_view import Answer
from tfdp.hosts.messages import MOST_REASON_CHARACTERS, checked_text, raise_if_refused

Arrays = list[np.ndarray]
POLL_SECONDS = 0.05
# Between two looks at somebody who has not come yet.
LOOK_SECONDS = 0.5


class OuterAllReduce:
    """One meeting, as one host goes through it.

    Args:
      company: the hosts.
      update: its number, the same on all hosts.
      arrays: what this host brings.
      say: is given a line for people when a host was lost.
    """

    def __init__(
        self,
        company: Members,
        update: int,
        arrays: Sequence[np.ndarray],
        say: Callable[[str], None],
    ):
        self._company, self._update, self._say = company, update, say
        self._arrays = [np.asarray(array, order="C") for array in arrays]
        self._terms = fingerprint_of_arrays(self._arrays)
        self._held: Arrays | None = None
        #: Until when those who answer may come, once this host leads.
        self._deadline = float("inf")
        self._lost_leaders = 0
        #: Whether hosts wait for the state, and this one is to give it.
        self.joiners: list[Peer] = []

    def hold(self) -> Arrays:
        """The means over all who take part, once the meeting is done.

        Raises:
          LeftOutError: the group goes on without this host.
          WorkerLostError: fewer than `min_hosts` are left.
          CollectiveError: the hosts bring different things.
        """
        company = self._company
        while True:
            leader = min(company.view.members)
            try:
                if leader == company.rank:
                    return self._lead()
                return self._follow(leader)
            except PeerLostError as lost:
                self._say(f"worker {lost.rank}, which led, is lost: {lost.reason}")
                company.drop(lost.rank)
                self._lost_leaders += 1
            except AllReduceDoneError as done:
                if self._held is None:
                    raise LeftOutError from done
                answer = done.answer
                company.take_over(
                    answer.epoch, answer.done, answer.members, answer.addresses
                )
                return self._held

    # As a member.

    def _follow(self, leader: int) -> Arrays:
        company = self._company
        late = _Late(company, leader, self._update)
        patience = company.patience(leader, self._update, late.check)
        while True:
            patience.check()
            try:
                hello = company.hello("come", self._update, self._arrays)
                connection = knock(company.address(leader), company.secret, hello)
            except OSError:
                continue  # patience ends it
            wire = Watched(connection, patience.check)
            try:
                return self._exchange(wire)
            except FoundOutError:
                raise
            except (OSError, ValueError):
                time.sleep(LOOK_SECONDS)
            finally:
                wire.close()

    def _exchange(self, wire: Watched) -> Arrays:
        company = self._company
        wire.send(*self._arrays)
        message = wire.hear()
        raise_if_refused(message)
        if "lost" in message:
            raise WorkerLostError(checked_text(message["lost"], MOST_REASON_CHARACTERS))
        means = [np.empty_like(array) for array in self._arrays]
        wire.fill(means)
        self._held = means
        wire.tell({"holds": self._update})
        company.adopt(wire.hear())
        with contextlib.suppress(OSError):  # it is done, whoever dies now
            wire.tell({"uses": self._update})
        return means

    # As the leader.

    def _lead(self) -> Arrays:
        company = self._company
        others = [rank for rank in company.view.members if rank != company.rank]
        # They may still wait for one that led before, as long as this host has.
        extra = 0.0 if self._lost_leaders == 0 else company.silence_seconds
        self._deadline = time.monotonic() + company.timeout_seconds + extra
        wires = self._for_each(others, self._receive)
        brought = {rank: arrays for rank, (_, arrays) in wires.items()}
        brought[company.rank] = self._arrays
        self._refuse_too_few(len(brought), [wire for wire, _ in wires.values()])
        means = _means([brought[rank] for rank in sorted(brought)])
        holders = self._for_each(
            list(wires), lambda rank, stop: self._hand_out(rank, wires[rank][0], means)
        )
        self._decide(sorted([company.rank, *holders]))
        message = company.agreement(list(company.view.members))

        def tell(rank: int, stop: threading.Event) -> bool:
            wire = wires[rank][0]
            try:
                wire.tell(message)
                wire.hear()
            except LeftOutError:
                raise
            except (OSError, ValueError):
                # Dead, or this host was stopped for long and is out itself.
                self._look_once(rank)
            finally:
                wire.close()
            return True

        self._for_each(list(holders), tell)
        return means

    def _for_each(
        self, ranks: Sequence[int], work: Callable[[int, threading.Event], Any]
    ) -> dict[int, Any]:
        """What `work` makes of each rank, side by side; without those lost."""
        if not ranks:
            return {}
        stop = threading.Event()
        results: dict[int, Any] = {}
        failure: BaseException | None = None
        with concurrent.futures.ThreadPoolExecutor(len(ranks)) as threads:
            futures = {threads.submit(work, rank, stop): rank for rank in ranks}
            for future in concurrent.futures.as_completed(futures):
                rank = futures[future]
                try:
                    results[rank] = future.result()
                except PeerLostError as lost:
                    self._say(f"worker {rank} is lost: {lost.reason}")
                    self._company.drop(rank)
                except BaseException as error:
                    failure = failure or error
                    stop.set()
        if failure is not None:
            raise failure
        return results

    def _receive(self, rank: int, stop: threading.Event) -> tuple[Watched, Arrays]:
        """The arrays of a member, once it has come."""
        company = self._company
        patience = company.patience(rank, self._update)
        next_look = time.monotonic() + LOOK_SECONDS
        while not stop.is_set():
            with company.changed:
                guest = company.take("come", rank)
                if guest is None:
                    company.changed.wait(POLL_SECONDS)
            now = time.monotonic()
            if guest is not None and guest.hello.update == self._update:
                wire = Watched(guest.connection, patience.check)
                arrays = self._take(guest, wire)
                if arrays is not None:
                    return wire, arrays
            if now >= self._deadline:
                company.exclude(rank)
                raise PeerLostError(
                    rank, f"it was {company.timeout_seconds:g} seconds late"
                )
            if now >= next_look:
                patience.check()
                next_look = time.monotonic() + LOOK_SECONDS
        raise PeerLostError(rank, "the meeting is over")

    def _take(self, guest: Peer, wire: Watched) -> Arrays | None:
        if guest.hello.terms != self._terms:
            reason = (
                f"Worker {guest.hello.rank} brings other weights to the meeting after "
                f"update {self._update} than worker {self._company.rank}. Give all "
                "workers the same model and the same sync."
            )
            wire.tell({"refused": reason})
            wire.close()
            raise CollectiveError(reason)
        arrays = [np.empty_like(array) for array in self._arrays]
        try:
            wire.fill(arrays)
            return arrays
        except FoundOutError:
            raise
        except OSError:
            wire.close()
            return None  # it may come again

    def _hand_out(self, rank: int, wire: Watched, means: Arrays) -> bool:
        try:
            wire.tell({"means": self._update})
            wire.send(*means)
            wire.hear()
            return True
        except FoundOutError:
            raise
        except (OSError, ValueError):
            self._company.exclude(rank)
            raise PeerLostError(rank, "its connection broke in the meeting") from None

    def _look_once(self, rank: int) -> None:
        patience = self._company.patience(rank)
        try:
            patience.check()
        except PeerLostError:
            return  # missed at the next meeting

    def _refuse_too_few(self, present: int, wires: Sequence[Watched]) -> None:
        """Waits until enough are there or wait to come in."""
        company = self._company
        deadline = time.monotonic() + company.timeout_seconds
        while True:
            with company.changed:
                if present + len(company.joiners()) >= company.min_hosts:
                    return
                company.changed.wait(LOOK_SECONDS)
            if time.monotonic() >= deadline:
                reason = (
                    f"{present} of {company.workers} hosts are left, and "
                    f"Communication(min_hosts={company.min_hosts}) asks for more. "
                    f"Nobody came back in {company.timeout_seconds:g} seconds."
                )
                for wire in wires:
                    with contextlib.suppress(OSError):
                        wire.tell({"lost": reason})
                raise WorkerLostError(reason)

    def _decide(self, members: list[int]) -> None:
        """From here on the meeting is done, with those who hold and who come in."""
        company = self._company
        with company.changed:
            view = company.view
            if view.is_told_out:
                raise LeftOutError
            for guest in company.take_joiners():
                if guest.hello.rank in members:
                    guest.connection.close()  # of a process that is there twice
                    continue
                self.joiners.append(guest)
                view.addresses[guest.hello.rank] = guest.address
            view.epoch += 1
            view.done = self._update
            joined = {guest.hello.rank for guest in self.joiners}
            view.members = tuple(sorted({*members, *joined}))


class _Late:
    """Ends the patience with a leader that answers, and does not come or go on."""

    def __init__(self, company: Members, leader: int, update: int):
        self._company, self._leader, self._update = company, leader, update
        self._deadline = time.monotonic() + company.timeout_seconds
        self._is_there = False

    def check(self, answer: Answer | None) -> None:
        if answer is not None and answer.at == self._update and not self._is_there:
            # It waits for others now, for as long at most.
            self._is_there = True
            company = self._company
            extra = company.timeout_seconds + company.silence_seconds
            self._deadline = time.monotonic() + extra
        if time.monotonic() >= self._deadline:
            self._company.exclude(self._leader)
            raise PeerLostError(
                self._leader, f"it was {self._company.timeout_seconds:g} seconds late"
            )


def _means(brought: Sequence[Arrays]) -> Arrays:
    """The mean of each array, added in the order of ranks, in its own type."""
    totals = [np.array(array) for array in brought[0]]
    for arrays in brought[1:]:
        for total, array in zip(totals, arrays, strict=True):
            np.add(total, array, out=total)
    count = len(brought)
    return [(total / count).astype(total.dtype, copy=False) for total in totals]
