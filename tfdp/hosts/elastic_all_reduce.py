"""Fault-tolerant all-reduce: a two-phase commit led by the lowest rank.

    member                          leader
    its arrays                ->
                                    adds up in the order of ranks, divides
                              <-    the means
    "I hold them"             ->
                                    commits: the all-reduce is done
                              <-    "done", the members of the next one
    "I use them"              ->

No host uses the means before all live hosts hold them. When the leader dies, the next
rank leads and the all-reduce is repeated; if a host has used the means already, others
that hold them learn that from it.
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
    try_dial,
)
from tfdp.hosts.elastic_view import ViewReply
from tfdp.hosts.messages import MOST_REASON_CHARACTERS, checked_text, raise_if_refused

Arrays = list[np.ndarray]
POLL_SECONDS = 0.05
# Interval of liveness checks of a host that has not come yet.
LOOK_SECONDS = 0.5


class OuterAllReduce:
    """One all-reduce on one host; `update` is its number."""

    def __init__(
        self,
        group: Members,
        update: int,
        arrays: Sequence[np.ndarray],
        say: Callable[[str], None],
    ):
        self._group, self._update, self._say = group, update, say
        self._late = f"it was {group.timeout_seconds:g} seconds late"
        self._arrays = [np.asarray(array, order="C") for array in arrays]
        self._terms = fingerprint_of_arrays(self._arrays)
        self._held: Arrays | None = None
        self._deadline = float("inf")  # the leader's, for members that answer queries
        self._lost_leaders = 0
        self.joiners: list[Peer] = []  # they wait for this host to send the state

    def hold(self) -> Arrays:
        """The means over all members.

        Raises LeftOutError if the group goes on without this host, WorkerLostError if
        fewer than `min_hosts` are left, CollectiveError if the hosts' arrays differ.
        """
        group = self._group
        while True:
            leader = min(group.view.members)
            try:
                if leader == group.rank:
                    return self._lead()
                return self._follow(leader)
            except PeerLostError as lost:
                self._say(f"worker {lost.rank}, the leader, is lost: {lost.reason}")
                group.drop(lost.rank)
                self._lost_leaders += 1
            except AllReduceDoneError as done:
                if self._held is None:
                    raise LeftOutError from done
                answer = done.answer
                group.take_over(
                    answer.epoch, answer.done, answer.members, answer.addresses
                )
                return self._held

    def _follow(self, leader: int) -> Arrays:
        group = self._group
        deadline, has_come = time.monotonic() + group.timeout_seconds, False

        def check_late(answer: ViewReply | None) -> None:
            nonlocal deadline, has_come
            if answer is not None and answer.at == self._update and not has_come:
                # The leader now waits for the other members, for at most as long.
                has_come = True
                extra = group.timeout_seconds + group.silence_seconds
                deadline = time.monotonic() + extra
            if time.monotonic() >= deadline:
                group.exclude(leader)
                raise PeerLostError(leader, self._late)

        detector = group.failure_detector(leader, self._update, check_late)
        while True:
            detector.check()
            try:
                hello = group.hello("come", self._update, self._arrays)
                connection = try_dial(group.address(leader), group.secret, hello)
            except OSError:
                continue  # the failure detector ends this
            wire = Watched(connection, detector.check)
            try:
                return self._exchange(wire)
            except FoundOutError:
                raise
            except (OSError, ValueError):
                time.sleep(LOOK_SECONDS)
            finally:
                wire.close()

    def _exchange(self, wire: Watched) -> Arrays:
        group = self._group
        wire.send(*self._arrays)
        message = wire.receive_line()
        raise_if_refused(message)
        if "lost" in message:
            raise WorkerLostError(checked_text(message["lost"], MOST_REASON_CHARACTERS))
        means = [np.empty_like(array) for array in self._arrays]
        wire.fill(means)
        self._held = means
        wire.send_line({"holds": self._update})
        group.adopt(wire.receive_line())
        with contextlib.suppress(OSError):  # committed, even if the leader dies now
            wire.send_line({"uses": self._update})
        return means

    def _lead(self) -> Arrays:
        group = self._group
        others = [rank for rank in group.view.members if rank != group.rank]
        # They may still be waiting for an earlier leader, as long as this host did.
        extra = 0.0 if self._lost_leaders == 0 else group.silence_seconds
        self._deadline = time.monotonic() + group.timeout_seconds + extra
        wires = self._for_each(others, self._receive)
        brought = {rank: arrays for rank, (_, arrays) in wires.items()}
        brought[group.rank] = self._arrays
        self._refuse_too_few(len(brought), [wire for wire, _ in wires.values()])
        means = mean_of([brought[rank] for rank in sorted(brought)])
        holders = self._for_each(
            list(wires), lambda rank, stop: self._hand_out(rank, wires[rank][0], means)
        )
        self._decide(sorted([group.rank, *holders]))
        message = group.agreement(list(group.view.members))

        def finish(rank: int, stop: threading.Event) -> bool:
            wire = wires[rank][0]
            try:
                wire.send_line(message)
                wire.receive_line()
            except LeftOutError:
                raise
            except (OSError, ValueError):
                # It died, or this host was suspended for long and is left out, which
                # this detects. The next all-reduce detects the former.
                with contextlib.suppress(PeerLostError):
                    group.failure_detector(rank).check()
            finally:
                wire.close()
            return True

        self._for_each(list(holders), finish)
        return means

    def _for_each(
        self, ranks: Sequence[int], work: Callable[[int, threading.Event], Any]
    ) -> dict[int, Any]:
        """The results of `work` by rank, in threads; without lost hosts."""
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
                    self._group.drop(rank)
                except BaseException as error:
                    failure = failure or error
                    stop.set()
        if failure is not None:
            raise failure
        return results

    def _receive(self, rank: int, stop: threading.Event) -> tuple[Watched, Arrays]:
        group = self._group
        detector = group.failure_detector(rank, self._update)
        next_look = time.monotonic() + LOOK_SECONDS
        while not stop.is_set():
            with group.changed:
                peer = group.listener.take("come", rank)
                if peer is None:
                    group.changed.wait(POLL_SECONDS)
            now = time.monotonic()
            if peer is not None and peer.hello.update == self._update:
                wire = Watched(peer.connection, detector.check)
                arrays = self._take(peer, wire)
                if arrays is not None:
                    return wire, arrays
            if now >= self._deadline:
                group.exclude(rank)
                raise PeerLostError(rank, self._late)
            if now >= next_look:
                detector.check()
                next_look = time.monotonic() + LOOK_SECONDS
        raise PeerLostError(rank, "the all-reduce is over")

    def _take(self, peer: Peer, wire: Watched) -> Arrays | None:
        if peer.hello.terms != self._terms:
            reason = (
                f"Worker {peer.hello.rank} has other weights in the all-reduce after "
                f"update {self._update} than worker {self._group.rank}. Give all "
                "workers the same model and the same sync."
            )
            wire.send_line({"refused": reason})
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
            wire.send_line({"means": self._update})
            wire.send(*means)
            wire.receive_line()
            return True
        except FoundOutError:
            raise
        except (OSError, ValueError):
            self._group.exclude(rank)
            raise PeerLostError(
                rank, "its connection broke in the all-reduce"
            ) from None

    def _refuse_too_few(self, present: int, wires: Sequence[Watched]) -> None:
        """Waits until enough hosts take part or wait to join, or raises."""
        group = self._group
        deadline = time.monotonic() + group.timeout_seconds
        while True:
            with group.changed:
                if present + len(group.listener.joiners()) >= group.min_hosts:
                    return
                group.changed.wait(LOOK_SECONDS)
            if time.monotonic() >= deadline:
                reason = (
                    f"{present} of {group.workers} hosts are left, and "
                    f"Communication(min_hosts={group.min_hosts}) requires more. No "
                    f"host returned within {group.timeout_seconds:g} seconds."
                )
                for wire in wires:
                    with contextlib.suppress(OSError):
                        wire.send_line({"lost": reason})
                raise WorkerLostError(reason)

    def _decide(self, members: list[int]) -> None:
        """Commits, with the hosts that hold the means and those that join."""
        group = self._group
        with group.changed:
            view = group.view
            if view.is_excluded:
                raise LeftOutError
            for peer in group.listener.take_joiners():
                if peer.hello.rank in members:
                    peer.connection.close()  # two processes have this rank
                    continue
                self.joiners.append(peer)
                view.addresses[peer.hello.rank] = peer.address
            view.epoch += 1
            view.done = self._update
            joined = {peer.hello.rank for peer in self.joiners}
            view.members = tuple(sorted({*members, *joined}))


def mean_of(brought: Sequence[Sequence[np.ndarray]]) -> Arrays:
    """The mean of each array, added in the order of ranks, in its own type."""
    totals = [np.array(array) for array in brought[0]]
    for arrays in brought[1:]:
        for total, array in zip(totals, arrays, strict=True):
            np.add(total, array, out=total)
    count = len(brought)
    return [(total / count).astype(total.dtype, copy=False) for total in totals]


def weighted_mean_of(
    weights: Sequence[float], brought: Sequence[Sequence[np.ndarray]]
) -> Arrays:
    """The mean of each array by weights, added in this order, in its own type.

    With equal weights, or none above 0, the bits are those of the plain mean.
    """
    total = sum(weights)
    if len(set(weights)) == 1 or not total > 0:
        return mean_of(brought)
    shares = [weight / total for weight in weights]
    means = []
    for arrays in zip(*brought, strict=True):
        parts = [
            array * array.dtype.type(share)
            for share, array in zip(shares, arrays, strict=True)
        ]
        means.append(np.asarray(sum(parts[1:], start=parts[0])))
    return means
