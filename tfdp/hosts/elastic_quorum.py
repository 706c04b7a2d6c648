"""Rounds of elastic hosts that do not wait for late hosts: a quorum decides.

    member                             thread of the leader's process
    its update, weight, arrays   ->
                                       waits for K members, then for `grace_seconds`;
                                       averages what came, by weights
                                 <-    the means of the rounds that the member has not
                                       seen, and the members of the next round

The leader (the lowest rank) collects in a thread, so that a round does not wait for its
own training either. A late member stays a member: when it comes, its arrays are
dropped, and it gets the means of the rounds that it missed, of which each host keeps
some. One that missed more is left out, and gets the state as a joining host does.

**Agreement.** One host decides a round. When it is lost, the next rank first queries
all others, each until it answers or counts as lost, and takes over the rounds that one
of them has. So no host has means that a live host of the group cannot get.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdp.checks import is_number
from tfdp.errors import CollectiveError, WorkerLostError
from tfdp.hosts.elastic_all_reduce import weighted_mean_of
from tfdp.hosts.elastic_membership import LeftOutError, Members, Peer
from tfdp.hosts.elastic_transfers import (
    FailureDetector,
    PeerLostError,
    Watched,
    fingerprint_of_arrays,
    try_dial,
)
from tfdp.hosts.elastic_view import MOST_COUNT, ViewReply
from tfdp.hosts.host_link import Arrays
from tfdp.hosts.messages import (
    MOST_REASON_CHARACTERS,
    checked_integer,
    checked_text,
    raise_if_refused,
)
from tfdp.hosts.quorum_values import Contribution, QuorumRules, Round

POLL_SECONDS = 0.05
LOOK_SECONDS = 0.5
# A leader that was suspended for so long may have lost its place.
SUSPENDED_SECONDS = 2.0


class NotLeadingError(ConnectionError):
    """This host decides no rounds now."""


class QuorumRounds:
    """A host's part in the rounds, as a member and, if it leads, as the leader.

    Args:
      like: arrays of the shapes and types that all hosts bring.
      say: receives lines for the log.
    """

    def __init__(
        self,
        group: Members,
        rules: QuorumRules,
        like: Sequence[np.ndarray],
        say: Callable[[str], None],
    ):
        self._group, self._rules, self._say = group, rules, say
        self._like = list(like)
        terms = f"{fingerprint_of_arrays(self._like)} {rules}"
        self._terms = hashlib.sha256(terms.encode()).hexdigest()
        self._wire: tuple[int, Watched] | None = None  # to the leader, from its member
        # Guarded by `group.changed`:
        self._came: dict[int, Contribution] = {}
        self._kept: list[Round] = []
        self._named_leader: int | None = None  # until the next agreement
        self._watched: set[int] = set()
        self._failure: str | None = None
        self._decided_at, self._round_seconds = time.monotonic(), float("inf")
        # Of the leader's thread:
        self._is_confirmed = False
        self._since: dict[str, float] = {}  # when what it waits for began
        self._ended = threading.Event()
        group.listener.keeps_late = True
        self._start(self._run, "tfdp-quorum")

    def _start(self, work: Callable[..., None], name: str, *arguments: Any) -> None:
        threading.Thread(target=work, name=name, args=arguments, daemon=True).start()

    @property
    def leader(self) -> int:
        """The rank that decides the next round, as far as this host has learned."""
        members, named = self._group.view.members, self._named_leader
        return named if named in members else min(members, default=self._group.rank)

    def meet(
        self, update: int, weight: float, arrays: Arrays
    ) -> tuple[list[Round], int]:
        """Brings `arrays` to the round after `update`; returns the rounds to apply.

        More than one, or one that ended before, if this host was late. Also returns
        by how many updates the others are probably ahead then. Raises LeftOutError,
        WorkerLostError, CollectiveError.
        """
        group, view = self._group, self._group.view
        detector: tuple[int, FailureDetector] | None = None
        while True:
            if view.is_excluded or self._ended.is_set():
                raise LeftOutError
            leader = self.leader
            if detector is None or detector[0] != leader:
                detector = leader, group.failure_detector(leader)
            try:
                if leader == group.rank:
                    own = Contribution(update, weight, arrays)
                    rounds, part, _ = self._contribute(leader, own)
                else:
                    rounds, part = self._bring(
                        leader, detector[1], update, weight, arrays
                    )
                break
            except PeerLostError as lost:
                self._say(f"worker {lost.rank}, the leader, is lost: {lost.reason}")
                group.drop(lost.rank)
            except LeftOutError:
                raise
            except (OSError, ValueError):
                time.sleep(POLL_SECONDS)  # the next try queries the leader first
        every = self._rules.every
        into_round = min(int(part * every), every - 1)
        return rounds, rounds[-1].update - update + into_round

    def _bring(
        self,
        leader: int,
        detector: FailureDetector,
        update: int,
        weight: float,
        arrays: Arrays,
    ) -> tuple[list[Round], float]:
        if self._wire is None or self._wire[0] != leader:
            self.disconnect()
            detector.check()
            self._wire = leader, self._dial(leader, detector.check)
        wire = self._wire[1]
        wire.check = detector.check
        try:
            wire.send_line({"update": update, "weight": weight})
            wire.send(*arrays)
            rounds, part = self._read_rounds(wire)
            if not rounds[0].before < update <= rounds[0].update:
                raise ValueError("not the round that this host came to")
            return rounds, part
        except BaseException:
            self.disconnect()
            raise

    def _dial(self, rank: int, check: Callable[[], None]) -> Watched:
        group = self._group
        hello = dataclasses.replace(group.hello("come"), terms=self._terms)
        return Watched(try_dial(group.address(rank), group.secret, hello), check)

    def _read_rounds(self, wire: Watched) -> tuple[list[Round], float]:
        """Reads the rounds and the agreement of another host and adopts them."""
        message = wire.receive_line()
        raise_if_refused(message)
        if message.get("left_out") is True:
            raise LeftOutError
        if "lost" in message:
            raise WorkerLostError(checked_text(message["lost"], MOST_REASON_CHARACTERS))
        numbers, part = message.get("rounds"), message.get("part")
        most = self._rules.kept_rounds
        if not isinstance(numbers, list) or not 0 < len(numbers) <= most:
            raise ValueError("not a list of rounds")
        if not is_number(part) or not 0.0 <= part <= 1.0:
            raise ValueError("not a part of a round")
        rounds = []
        for pair in numbers:
            if not isinstance(pair, list) or len(pair) != 2:
                raise ValueError("not a round")
            before, update = (checked_integer(one, 0, MOST_COUNT) for one in pair)
            means = [np.empty_like(array) for array in self._like]
            wire.fill(means)
            rounds.append(Round(before, update, means))
        with self._group.changed:
            for one in rounds:
                self._keep(one)
            epoch = checked_integer(message.get("epoch"), 0, MOST_COUNT)
            if epoch >= self._group.view.epoch:
                self._group.adopt(message)
                self._named_leader = None
            self._group.changed.notify_all()
        return rounds, float(part)

    def joined(self, leader: int) -> None:
        """Notes that this host has the state of `leader`, which stays the leader."""
        with self._group.changed:
            self._named_leader = leader
            self._kept.clear()

    def admit(self, peer: Peer) -> None:
        """Admits a joining host, on the leader, once it has the state: it may come now.
        The others learn of it by the next agreement, which may make it the leader."""
        with self._group.changed:
            self._named_leader = self.leader
            self._group.admit(peer)

    def disconnect(self) -> None:
        if self._wire is not None:
            self._wire[1].close()
            self._wire = None

    def close(self) -> None:
        self._ended.set()
        self.disconnect()

    # The leader, and what any host has of earlier rounds.

    def _run(self) -> None:
        try:
            self._lead()
        except BaseException as error:
            with self._group.changed:
                self._failure = f"Worker {self._group.rank} leads and failed: {error!r}"
                self._group.changed.notify_all()

    def _lead(self) -> None:
        group = self._group
        polled_at = time.monotonic()
        while not self._ended.is_set():
            with group.changed:
                peers = [group.listener.take("come", r) for r in range(group.workers)]
                if not any(peers):
                    group.changed.wait(POLL_SECONDS)
            for peer in peers:
                if peer is not None:
                    self._start(self._serve, "tfdp-quorum-member", peer)
            now = time.monotonic()
            if now - polled_at > SUSPENDED_SECONDS:
                self._is_confirmed = False
            polled_at = now
            if self._leads():
                self._advance(now)

    def _serve(self, peer: Peer) -> None:
        """Answers a member until its connection ends."""
        wire = Watched(peer.connection, self._check_open)
        reason: dict[str, Any] | None = None
        try:
            self._check_peer(peer)
            while True:
                message = wire.receive_line()
                if "since" in message:
                    since = checked_integer(message["since"], 0, MOST_COUNT)
                    self._send(wire, *self._rounds_since(since))
                    continue
                update = checked_integer(message.get("update"), 1, MOST_COUNT)
                weight = message.get("weight")
                if not is_number(weight) or not 0 <= weight < float("inf"):
                    raise ValueError("not a weight")
                arrays = [np.empty_like(array) for array in self._like]
                wire.fill(arrays)
                brought = Contribution(update, float(weight), arrays)
                rank = peer.hello.rank
                self._send(wire, *self._contribute(rank, brought))
        except LeftOutError:
            reason = {"left_out": True}
        except WorkerLostError as error:
            reason = {"lost": str(error)}
        except CollectiveError as error:
            reason = {"refused": str(error)}
        except (OSError, ValueError):
            pass
        finally:
            if reason is not None:
                with contextlib.suppress(OSError):
                    wire.send_line(reason)
            wire.close()
            self._watch(peer.hello.rank)

    def _check_open(self) -> None:
        if self._ended.is_set():
            raise NotLeadingError("this host has ended")

    def _check_peer(self, peer: Peer) -> None:
        """Refuses other terms, and a process that another one has replaced."""
        group, rank = self._group, peer.hello.rank
        if peer.hello.terms != self._terms:
            raise CollectiveError(
                f"Worker {rank} has other weights or another sync than worker "
                f"{group.rank}. Give all workers the same model and the same sync."
            )
        with group.changed:
            known = group.view.addresses.get(rank)
            is_in = group.view.is_in and not group.view.is_excluded
        if is_in and rank and known is not None and known[1] != peer.hello.port:
            raise LeftOutError

    def _send(
        self, wire: Watched, rounds: list[Round], part: float, agreement: Mapping
    ) -> None:
        pairs = [[one.before, one.update] for one in rounds]
        wire.send_line({**agreement, "rounds": pairs, "part": part})
        for one in rounds:
            wire.send(*one.means)

    def _rounds_since(self, since: int) -> tuple[list[Round], float, dict[str, Any]]:
        """All rounds after update `since`; LeftOutError if one of them is gone."""
        group = self._group
        with group.changed:
            rounds = [one for one in self._kept if one.update > since]
            if not rounds or rounds[0].before > since:
                raise LeftOutError
            seconds = time.monotonic() - self._decided_at
            part = min(seconds / self._round_seconds, 1.0)
            return rounds, part, group.agreement(list(group.view.members))

    def _keep(self, one: Round) -> None:
        """Stores a round, under `changed`; what does not follow it is discarded."""
        last = self._kept[-1].update if self._kept else None
        if last is not None and one.update <= last:
            return
        if last != one.before:
            self._kept.clear()
        self._kept.append(one)
        del self._kept[: -self._rules.kept_rounds]
        now = time.monotonic()
        if last is not None:
            self._round_seconds = max(now - self._decided_at, 1e-6)
        self._decided_at = now
        done = self._group.view.done = max(self._group.view.done, one.update)
        for rank in [r for r, came in self._came.items() if came.update <= done]:
            del self._came[rank]

    def _contribute(
        self, rank: int, brought: Contribution
    ) -> tuple[list[Round], float, dict[str, Any]]:
        """Waits for the round; returns it, or those since, if it is over already."""
        group, view = self._group, self._group.view
        update = brought.update
        with group.changed:
            was_late = update <= view.done
            try:
                self._wait_until_done(rank, brought)
            except BaseException:
                if self._came.get(rank) is brought:
                    del self._came[rank]
                raise
            if rank not in view.members:
                raise LeftOutError
            rounds, part, agreement = self._rounds_since(update - 1)
        return rounds, part if was_late or len(rounds) > 1 else 0.0, agreement

    def _wait_until_done(self, rank: int, brought: Contribution) -> None:
        group, view, update = self._group, self._group.view, brought.update
        has_registered = False
        while update > view.done:
            if self._failure is not None:
                raise WorkerLostError(self._failure)
            if not view.is_in or view.is_excluded or self._ended.is_set():
                raise NotLeadingError("this host is left out")
            if brought.is_out or rank not in view.members:
                raise LeftOutError
            if not has_registered:
                has_registered = True
                others = {one.update for one in self._came.values()}
                if others - {update}:
                    raise CollectiveError(
                        f"Worker {rank} comes after update {update}, and others "
                        f"after update {max(others)}. Give all workers the same sync."
                    )
                self._came[rank] = brought
                group.changed.notify_all()
            group.changed.wait(POLL_SECONDS)

    def _leads(self) -> bool:
        """Whether somebody waits for this host to decide, and it may."""
        group = self._group
        with group.changed:
            view = group.view
            if not self._came:
                self._since.clear()
                return False
            if not view.is_in or view.is_excluded:
                return False
            leader = self.leader
        if leader != group.rank:
            # Those that came take the leader for lost; this host finds out.
            self._is_confirmed = False
            self._watch(leader)
            return False
        if not self._is_confirmed:
            self._is_confirmed = self._take_over()
        return self._is_confirmed

    def _advance(self, now: float) -> None:
        """Decides the round if it is time; else watches those that are missing."""
        group, rules = self._group, self._rules
        with group.changed:
            present = len(self._came)
            absent = sorted(set(group.view.members) - self._came.keys())
            joiners = len(group.listener.joiners())
            is_enough = not self._is_short()
        waited = now - self._since.setdefault("first", now)
        if is_enough and present + joiners >= group.min_hosts:
            enough_at = self._since.setdefault("enough", now)
            if not absent or now >= enough_at + rules.grace_seconds:
                self._decide()
            return
        if not is_enough:
            for rank in absent:
                if waited >= group.timeout_seconds:
                    self._lose(rank, f"it was {group.timeout_seconds:g} seconds late")
                else:
                    self._watch(rank)
        elif now >= self._since.setdefault("few", now) + group.timeout_seconds:
            with group.changed:
                self._failure = (
                    f"{present} of {group.workers} hosts are left, and "
                    f"Communication(min_hosts={group.min_hosts}) requires more. No "
                    f"host returned within {group.timeout_seconds:g} seconds."
                )
                group.changed.notify_all()

    def _is_short(self) -> bool:
        """Whether members wait and are fewer than the quorum, or all that are left."""
        everyone = len(self._came.keys() | set(self._group.view.members))
        return 0 < len(self._came) < min(self._rules.quorum, everyone)

    def _decide(self) -> None:
        group, view = self._group, self._group.view
        with group.changed:
            came = dict(sorted(self._came.items()))
        means = weighted_mean_of(
            [one.weight for one in came.values()], [one.arrays for one in came.values()]
        )
        update = next(iter(came.values())).update
        with group.changed:
            if view.is_excluded or not view.is_in:
                return
            late = sorted(set(view.members) - came.keys())
            self._since.clear()
            before = view.done
            view.epoch += 1
            self._named_leader = None
            self._keep(Round(before, update, means))
            group.changed.notify_all()
        if late and self._rules.every > 1:  # else a line in many steps
            ranks = ", ".join(map(str, late))
            self._say(f"the round after update {update} ended without workers {ranks}")

    def _watch(self, rank: int) -> None:
        """Queries a member, in a thread, until it comes or is lost, at least once."""
        group = self._group
        with group.changed:
            is_due = rank in group.view.members and rank not in self._watched
            if not is_due or rank == group.rank or not group.view.is_in:
                return
            self._watched.add(rank)
        self._start(self._look_after, "tfdp-quorum-watch", rank)

    def _look_after(self, rank: int) -> None:
        group = self._group
        says: list[int | None] = []

        def note(answer: ViewReply | None) -> None:
            says[:] = [] if answer is None else [answer.leader]

        detector = group.failure_detector(rank, also=note)
        try:
            while not self._ended.is_set():
                detector.check()
                with group.changed:
                    if says == [rank] == [self.leader]:
                        # It leads on: those that came here have lost it alone.
                        for one in self._came.values():
                            one.is_out = True
                        self._came.clear()
                    if rank in self._came or not self._is_short():
                        return
                self._ended.wait(LOOK_SECONDS)
        except LeftOutError:
            with group.changed:
                group.view.is_excluded = True
        except PeerLostError as lost:
            self._lose(rank, lost.reason)
        finally:
            with group.changed:
                self._watched.discard(rank)
                group.changed.notify_all()

    def _lose(self, rank: int, reason: str) -> None:
        self._say(f"worker {rank} is lost: {reason}")
        self._group.drop(rank)

    def _take_over(self) -> bool:
        """Takes over what others have decided meanwhile, before this host decides."""
        group = self._group
        others = [rank for rank in group.view.members if rank != group.rank]
        answers: dict[int, ViewReply] = {}

        def find(rank: int) -> None:
            def note(answer: ViewReply | None) -> None:
                if answer is not None:
                    answers[rank] = answer

            detector = group.failure_detector(rank, also=note)
            try:
                while rank not in answers and not self._ended.is_set():
                    detector.check()
            except PeerLostError as lost:
                self._lose(rank, lost.reason)

        try:
            if others:
                with concurrent.futures.ThreadPoolExecutor(len(others)) as threads:
                    list(threads.map(find, others))
            done = {rank: answers[rank].done for rank in answers}
            newest = max(done, key=done.__getitem__, default=group.rank)
            if done.get(newest, 0) > group.view.done:
                wire = self._dial(newest, group.failure_detector(newest).check)
                try:
                    wire.send_line({"since": group.view.done})
                    self._read_rounds(wire)
                finally:
                    wire.close()
                return self.leader == group.rank
        except LeftOutError:
            with group.changed:
                group.view.is_excluded = True
            return False
        except (OSError, ValueError, CollectiveError):
            return False
        return True
