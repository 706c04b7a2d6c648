"""Elastic hosts: they train locally, all-reduce now and then, may die and return.

**Membership** is agreed by the live hosts at each all-reduce, which ends with a new
epoch and the ranks of its members (`elastic_view`). The lowest rank leads; if it dies,
the next one does, so no host is essential. Hosts join at worker 0's address; while
worker 0 is away only it can join: the group's leader looks for it every second.

**Failures.** A dead process refuses connections at once. A host that gives no answer
for `silence_seconds`, or answers but is `timeout_seconds` late, is left out; it learns
that from its next query and joins again. A host is left out only after a query or a
timeout, and the queried host decides, so that two hosts cannot drop each other. After a
network partition each part goes on if `min_hosts` permits; if that is more than half of
the hosts, at most one part does. When they reconnect, the part with fewer all-reduces
joins the other.

**Joining.** After an all-reduce the leader sends its training state. Both hosts compute
its size from their own model, and nothing is unpickled.

**Delay** per lost host: under a second if its process died, `silence_seconds` and some
seconds of tries if it is silent, `timeout_seconds` if it is late.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdp.errors import ConfigurationError, WorkerLostError
from tfdp.hosts.elastic_all_reduce import OuterAllReduce
from tfdp.hosts.elastic_join import (
    Bootstrap,
    begin_at_worker_0,
    find_leader,
    give_state,
    have_ended,
    receive_state,
    wait_for_beginners,
    wait_for_late_hosts,
)
from tfdp.hosts.elastic_membership import ElasticListener, LeftOutError, Members, Peer
from tfdp.hosts.elastic_transfers import try_dial
from tfdp.hosts.elastic_view import View
from tfdp.hosts.host_link import Arrays
from tfdp.hosts.listener import listen_at
from tfdp.hosts.rendezvous import parse_address
from tfdp.hosts.wire import read_line

if TYPE_CHECKING:
    from tfdp.hosts.elastic_quorum import QuorumRounds
    from tfdp.hosts.quorum_values import QuorumRules

# Outcomes of an all-reduce: done; done, and this host must send the state; left out.
MET, GIVES, LEFT_OUT = 0, 1, 2

LOOK_SECONDS = 1.0
RETRY_SECONDS = 0.25


def _print(line: str) -> None:
    print(f"tfdp: {line}", file=sys.stderr, flush=True)


class ElasticHosts:
    """This host in an elastic group; see the module.

    Args:
      workers: the most hosts there may be.
      coordinator: "host:port" of worker 0.
      timeout_seconds, silence_seconds, min_hosts: see `Communication`.
      settings: must be the same on all hosts, else a CollectiveError; JSON.
      seed: two numbers; others take over worker 0's.
      say: receives lines for the log.
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
        self.rank, self.workers, self._say = rank, workers, say
        self._group = group = Members(
            rank,
            workers,
            secret,
            parse_address(coordinator),
            timeout_seconds,
            silence_seconds,
            min_hosts,
            View(rank=rank),
            threading.Condition(),
        )
        self._to_give: list[Peer] = []
        self._had_state = False  # before it was left out
        self._quorum: QuorumRounds | None = None
        self._quorum_rules: QuorumRules | None = None
        #: Updates that this host left out; see `meet_quorum`.
        self.skipped_updates = 0
        self._ended = threading.Event()
        self._closing = threading.Lock()
        self._begins = False
        self.seed = list(seed)
        settings = dict(settings or {})
        self._bootstrap = Bootstrap(group, settings, seed)
        if rank == 0:
            group.port = group.coordinator[1]
            self._open(listen_at(*group.coordinator))
            try:
                self._begins = self._bootstrap.wait_for_all()
            except BaseException:
                self.close()
                raise
        else:
            listener, self.seed = begin_at_worker_0(group, settings)
            self._open([listener])
            name, look = "tfdp-find-worker-0", self._look_for_worker_0
            threading.Thread(target=look, name=name, daemon=True).start()
        #: Whether the group was training when this process started.
        self.comes_back = not self._begins and group.view.epoch > 0

    def _open(self, listeners: Sequence[socket.socket]) -> None:
        group = self._group
        own = (group.secret, group.view, group.changed)
        on = (self._bootstrap.on_start, self._bootstrap.on_lives)
        group.listener = ElasticListener(listeners, *own, *on)

    @property
    def present(self) -> tuple[int, ...]:
        """The ranks of the last agreement's members, without those found dead."""
        return self._group.view.members

    @property
    def epoch(self) -> int:
        return self._group.view.epoch

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and batch of this host's `fit`; joining hosts start there."""
        return self._group.view.place

    @place.setter
    def place(self, place: tuple[int, int]) -> None:
        self._group.view.place = place

    def place_of_group(self) -> tuple[int, int] | None:
        """The group's place, before this host joins; None if no group is found."""
        leader = find_leader(self._group)
        return None if leader is None else self._group.view.place

    def exchange_state(self, arrays: Arrays) -> list[np.ndarray]:
        """This host's state, or a live peer's if this host joins.

        Call it before the first step, and before the step after an all-reduce that
        returned GIVES or LEFT_OUT. Arrays have the same shapes and types on all hosts.

        Raises WorkerLostError if no group is found for `timeout_seconds`,
        CollectiveError if the hosts' models differ.
        """
        mine = [np.asarray(array, order="C") for array in arrays]
        if not self._group.view.is_in:
            return self._enter(mine)
        if self._begins:
            self._begins = False
            self._to_give = wait_for_beginners(self._group, self._say)
        peers, self._to_give = self._to_give, []
        if peers:
            admit = None if self._quorum is None else self._quorum.admit
            if self.is_over:
                admit = self._group.admit
            give_state(self._group, peers, mine, self._say, admit)
        return mine

    def meet(self, update: int, arrays: Arrays) -> tuple[list[np.ndarray], int]:
        """All-reduces float arrays over the members, after `update` on all hosts.

        Returns the means, the same bits on all hosts, and MET or GIVES; or `arrays` and
        LEFT_OUT. Raises WorkerLostError if fewer than `min_hosts` are left for
        `timeout_seconds`, CollectiveError if the hosts' arrays differ.

        Cost: n bytes to the leader and n from it, for each other host.
        """
        group = self._group
        if self.is_over:
            return [np.asarray(array) for array in arrays], LEFT_OUT
        before = group.view.members
        group.view.at = update
        try:
            all_reduce = OuterAllReduce(group, update, arrays, self._about(update))
            if group.view.is_excluded:
                raise LeftOutError
            means = all_reduce.hold()
        except LeftOutError:
            self._leave_group(update)
            return [np.asarray(array) for array in arrays], LEFT_OUT
        finally:
            group.view.at = None
        self._to_give = all_reduce.joiners
        group.view.made = update
        if group.view.members != before:
            ranks = ", ".join(map(str, group.view.members))
            self._about(update)(f"members are now workers {ranks}")
        return means, GIVES if self._to_give else MET

    def begin_quorum(self, rules: QuorumRules, like: Arrays) -> None:
        """Sets the rules of `meet_quorum` and the shapes of arrays; the same again has
        no effect.

        Raises:
          ConfigurationError: for the rules of another optimizer.
        """
        # By identity: each optimizer makes its own.
        if self._quorum_rules is not None and self._quorum_rules is not rules:
            raise ConfigurationError(
                "A second optimizer, of this model or another, has DiLoCo(quorum=...) "
                "or BackupWorkers(...) in one process, and hosts keep the rounds of "
                "the first. Give a model one optimizer, and train each such model in "
                "a job of its own; or use DiLoCo without a quorum."
            )
        if self._quorum is None:
            self._quorum_rules = rules
            from tfdp.hosts import elastic_quorum

            own = self._group, rules, like, self._say
            self._quorum = elastic_quorum.QuorumRounds(*own)

    def meet_quorum(
        self, update: int, weight: float, arrays: Arrays
    ) -> tuple[list[np.ndarray], int, int]:
        """Averages over a quorum (`tfdp.hosts.elastic_quorum`), weighted by `weight`.

        Returns the means of the round, and of others that this host missed, stacked;
        the outcome, without any round if it is LEFT_OUT; and how many updates the
        others are ahead of this one. Call `begin_quorum` first.
        """
        group, quorum = self._group, self._quorum
        if quorum is None:
            raise RuntimeError("begin_quorum was not called")
        no_rounds = [np.zeros((0, *a.shape), a.dtype) for a in arrays]
        if self.is_over:
            return no_rounds, MET, 0
        group.view.at = update
        try:
            rounds, skipped = quorum.meet(update, weight, arrays)
        except LeftOutError:
            quorum.disconnect()
            self._leave_group(update)
            return no_rounds, LEFT_OUT, 0
        finally:
            group.view.at = None
        if quorum.leader == self.rank and not self._to_give:
            with group.changed:
                self._to_give = group.listener.take_joiners()
        group.view.made = rounds[-1].update
        self.skipped_updates += skipped
        outcome = GIVES if self._to_give else MET
        means = zip(*(one.means for one in rounds), strict=True)
        return [np.stack(of_rounds) for of_rounds in means], outcome, skipped

    def _about(self, update: int) -> Callable[[str], None]:
        return lambda line: self._say(
            f"worker {self.rank}, all-reduce after update {update}: {line}"
        )

    def _leave_group(self, update: int) -> None:
        group = self._group
        line = (
            "the others have gone on without this one; it joins again with their state"
        )
        self._about(update)(line)
        self._had_state = True
        with group.changed:
            group.view.is_in = group.view.is_excluded = False
            for peer in group.listener.take_joiners():
                peer.connection.close()  # it will find the new leader

    def _enter(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        group = self._group
        deadline = time.monotonic() + group.timeout_seconds
        while not self._ended.is_set():
            leader = find_leader(group)
            if leader is not None:
                deadline = time.monotonic() + group.timeout_seconds
                with contextlib.suppress(OSError, ValueError):
                    state = receive_state(group, leader, arrays, self._ended)
                    if self._quorum is not None:
                        self._quorum.joined(leader)
                    members = ", ".join(map(str, group.view.members))
                    self._say(
                        f"worker {self.rank} joins after update {group.view.done} "
                        f"with the state of worker {leader}; members are workers "
                        f"{members}"
                    )
                    return state
            elif self._had_state and group.min_hosts == 1 and have_ended(group):
                return self._go_on_alone(arrays)
            if time.monotonic() >= deadline:
                raise WorkerLostError(
                    f"Worker {self.rank} found no training host to take the state from "
                    f"for {group.timeout_seconds:g} seconds. See the others' output."
                )
            time.sleep(RETRY_SECONDS)
        raise WorkerLostError(f"Worker {self.rank} was closed while it waited.")

    def _go_on_alone(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Keeps this host's own state, the newest that is left."""
        group, view = self._group, self._group.view
        with group.changed:
            view.members, view.done = (self.rank,), view.made
            view.is_in, view.is_excluded = True, False
        if self._quorum is not None:
            self._quorum.joined(self.rank)
        self._say(f"worker {self.rank}: all others have ended; it goes on alone")
        return arrays

    @property
    def is_over(self) -> bool:
        """Whether this `fit` is to end: its state is that of a host that has ended."""
        return self._group.view.is_over

    def begin_fit(self) -> None:
        self._group.view.is_over = False

    def end_fit(self, exchange: Callable[[], None]) -> None:
        """Lets hosts end `fit` with one state, as far as they are alive.

        Args:
          exchange: calls `exchange_state` with this host's state.
        """
        group = self._group
        if group.view.is_excluded:
            self._leave_group(group.view.made)
        if not group.view.is_in:
            if find_leader(group) is None:
                return
            exchange()
        group.view.is_over = True

        def give() -> None:
            with group.changed:
                self._to_give += group.listener.take_joiners()
            if self._to_give:
                exchange()

        wait_for_late_hosts(group, give)

    def _look_for_worker_0(self) -> None:
        """Looks for a restarted worker 0 as long as this host leads in its place."""
        group = self._group
        while not self._ended.wait(LOOK_SECONDS):
            with group.changed:
                view = group.view
                others = [rank for rank in view.members if rank != 0]
                leads = view.is_in and min(others, default=None) == self.rank
            if not leads:
                continue
            try:
                if 0 in view.members:
                    answer = group.query(0)
                    if answer is None or answer.session:
                        continue
                    group.drop(0)  # a new process has its address
                with try_dial(
                    group.coordinator, group.secret, group.hello("lives")
                ) as connection:
                    message = read_line(connection, time.monotonic() + LOOK_SECONDS)
            except (OSError, ValueError):
                continue
            if message.get("is_out") is True:
                with group.changed:
                    view.is_excluded = True

    def close(self) -> None:
        with self._closing:
            if self._ended.is_set():
                return
            self._ended.set()
        if self._quorum is not None:
            self._quorum.close()
        self._group.listener.close()
        for peer in self._to_give:
            peer.connection.close()
