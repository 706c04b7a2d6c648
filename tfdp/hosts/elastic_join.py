"""How hosts of an elastic group join: all at the start, later one by one.

All hosts start at worker 0's listener. It waits for all others and sends everyone's
address; or a group that already trains without worker 0 contacts it (`ElasticHosts`),
and it joins that group. Returning hosts get the group's addresses there.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
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
from tfdp.hosts.connect import HANDSHAKE_SECONDS, SESSION_BYTES, StrangerError, dial
from tfdp.hosts.elastic_membership import Members, Peer
from tfdp.hosts.elastic_transfers import (
    PURPOSE,
    FailureDetector,
    PeerLostError,
    Watched,
    fingerprint_of_arrays,
    send_and_close,
    try_dial,
)
from tfdp.hosts.elastic_view import ViewReply, parse_answer, parse_place
from tfdp.hosts.host_link import Arrays
from tfdp.hosts.listener import listen, local_address
from tfdp.hosts.messages import (
    checked_integer,
    missing_workers,
    raise_if_refused,
    rank_is_taken,
    setting_mismatch,
)
from tfdp.hosts.wire import has_ended, read_line

RETRY_SECONDS = 0.25
MOST_SEED = 2**63 - 1


class Bootstrap:
    """Worker 0's part: sends starting hosts to their group, with worker 0's seed."""

    def __init__(
        self, group: Members, settings: Mapping[str, Any], seed: Sequence[int]
    ):
        self._group, self._settings = group, settings
        self.seed = list(seed)
        self._beginners: dict[int, Peer] = {}
        self._is_open = True
        self._refusal = ""

    def on_start(self, peer: Peer) -> None:
        """Handles a process that has just started; in the listener's thread."""
        group, hello = self._group, peer.hello
        reason = self._why_refused(peer)
        if reason is not None:
            self._refusal = f" {reason}"
            send_and_close(peer.connection, {"refused": reason})
            return
        with group.changed:
            if self._is_open:
                self._beginners[hello.rank] = peer
                group.changed.notify_all()
                return
            answer = group.view.as_json()
        send_and_close(peer.connection, {"group": answer, "seed": self.seed})

    def on_lives(self, peer: Peer) -> None:
        """Handles the leader of a group without this worker 0; in the same thread."""
        group, hello = self._group, peer.hello
        with group.changed:
            view = group.view
            yields = True
            if not view.session:
                # This process has just started: it will join that group.
                view.session, view.epoch = hello.session, hello.epoch
                view.addresses[hello.rank] = peer.address
                view.members = (hello.rank,)
            elif hello.session != view.session:
                yields = False
            elif view.is_in and hello.rank not in view.members:
                # Each went on without the other: the one with the older epoch rejoins.
                yields = hello.epoch > view.epoch
                view.is_excluded = view.is_excluded or yields
            elif view.is_in:
                view.is_excluded = True  # not noticed yet
            else:
                view.addresses[hello.rank] = peer.address
            group.changed.notify_all()
        send_and_close(peer.connection, {"is_out": not yields})

    def wait_for_all(self) -> bool:
        """Waits for all hosts (CollectiveError if late); false if a group trains."""
        group = self._group
        deadline = time.monotonic() + group.timeout_seconds
        others = set(range(1, group.workers))
        with group.changed:
            while others - self._beginners.keys() and not group.view.session:
                if time.monotonic() >= deadline:
                    missing = sorted(others - self._beginners.keys())
                    reason = missing_workers(missing, group.workers)
                    raise CollectiveError(reason + self._refusal)
                group.changed.wait(RETRY_SECONDS)
                for rank, peer in list(self._beginners.items()):
                    if has_ended(peer.connection):
                        del self._beginners[rank]
            self._is_open = False
            beginners = list(self._beginners.values())
            begins = not group.view.session
            if begins:
                group.view.session = secrets.token_hex(SESSION_BYTES)
                group.view.members, group.view.is_in = (0,), True
                for peer in beginners:
                    group.view.addresses[peer.hello.rank] = peer.address
            answer = group.view.as_json()
        for peer in beginners:
            send_and_close(peer.connection, {"group": answer, "seed": self.seed})
        return begins

    def _why_refused(self, peer: Peer) -> str | None:
        group, hello = self._group, peer.hello
        mismatch = setting_mismatch(
            hello.rank,
            (hello.workers, group.workers, "workers"),
            (hello.version, __version__, "the tfdp version"),
        )
        if mismatch is not None:
            return mismatch
        earlier = self._beginners.get(hello.rank)
        is_taken = self._is_open and earlier and not has_ended(earlier.connection)
        if is_taken or hello.rank == 0:
            return rank_is_taken(hello.rank, group.workers)
        if hello.terms != digest(self._settings):
            return (
                f"Worker {hello.rank} has other settings than worker 0, which has "
                f"{dict(self._settings)}. Give every worker the same."
            )
        return None


def digest(settings: Mapping[str, Any]) -> str:
    """The same text for the same settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def begin_at_worker_0(
    group: Members, settings: Mapping[str, Any]
) -> tuple[socket.socket, list[int]]:
    """Gets the group from worker 0 or fails; returns a listening socket, the seed."""
    deadline = time.monotonic() + group.timeout_seconds
    listeners: list[socket.socket] = []

    def hello(connection: socket.socket) -> dict[str, Any]:
        if not listeners:
            listeners.append(listen(local_address(connection)))
            group.port = listeners[0].getsockname()[1]
        own = dataclasses.replace(group.hello("start"), terms=digest(settings))
        return dataclasses.asdict(own)

    try:
        while True:
            try:
                seed = _request_group(group, hello, deadline)
                return listeners[0], seed
            except (OSError, ValueError) as error:
                is_final = isinstance(error, StrangerError | socket.gaierror)
                if is_final or time.monotonic() >= deadline:
                    host, port = group.coordinator
                    raise CollectiveError(
                        f"Worker {group.rank} found no worker 0 of its job at "
                        f"{host}:{port}: {error}. Start worker 0 with the same "
                        "settings (min_hosts as well) and the same TFDP_JOB_KEY; check "
                        "the address and the firewall. While worker 0 is away no other "
                        "host can join."
                    ) from error
            time.sleep(RETRY_SECONDS)
    except BaseException:
        for listener in listeners:
            listener.close()
        raise


def _request_group(group: Members, hello: Any, deadline: float) -> list[int]:
    own = group.coordinator, group.secret, PURPOSE, hello, deadline
    with dial(*own, name_seconds=unknown_name_seconds()) as connection:
        # Worker 0 may have started later, and waits for as long as this one.
        until = time.monotonic() + group.timeout_seconds + HANDSHAKE_SECONDS
        message = read_line(connection, until)
    raise_if_refused(message)
    answer = parse_answer(message.get("group") or {}, group.workers)
    seed = message.get("seed")
    if not isinstance(seed, list) or len(seed) != 2 or not answer.session:
        raise ValueError("not a group")
    with group.changed:
        view = group.view
        view.session, view.epoch = answer.session, answer.epoch
        view.members = answer.members
        view.addresses = dict(answer.addresses)
    return [checked_integer(part, 0, MOST_SEED) for part in seed]


def have_ended(group: Members) -> bool:
    """Whether the processes of all other hosts have ended."""
    for rank in range(group.workers):
        with contextlib.suppress(ConnectionRefusedError):
            if rank != group.rank:
                group.query(rank)
                return False
    return True


def find_leader(group: Members) -> int | None:
    """The leader according to a member of the group, or None; updates addresses."""
    with group.changed:
        session, known = group.view.session, sorted(group.view.addresses)
    for rank in dict.fromkeys([0, *known]):
        if rank == group.rank:
            continue
        try:
            answer = group.query(rank)
        except OSError:
            continue
        if answer is None or not answer.is_in or answer.session != session:
            continue
        with group.changed:
            group.view.addresses |= answer.addresses
            group.view.place = answer.place
        if answer.leader is not None and answer.leader != group.rank:
            return answer.leader
    return None


Say = Callable[[str], None]


def receive_state(
    group: Members, leader: int, arrays: Arrays, ended: threading.Event
) -> list[np.ndarray]:
    """Joins the group; returns the leader's state, after its next all-reduce.

    This host sends "join" and a fingerprint of `arrays`; the leader replies with epoch,
    members, place and state; this host confirms. Raises OSError or ValueError if it is
    no longer the leader or `ended` is set, CollectiveError if its model differs.
    """

    def look() -> bool:
        answer = group.query(leader)
        if answer is None:
            return False
        if not answer.is_in or answer.leader != leader or ended.is_set():
            raise PeerLostError(leader, "another host leads")
        return True

    detector = FailureDetector(leader, group.silence_seconds, look)
    hello = group.hello("join", arrays=arrays)
    connection = try_dial(group.address(leader), group.secret, hello)
    wire = Watched(connection, detector.check)
    try:
        message = wire.receive_line()
        raise_if_refused(message)
        state = [np.empty_like(array) for array in arrays]
        wire.fill(state)
        place = parse_place(message.get("place"))
        group.adopt(message)
        with group.changed:
            group.view.is_in, group.view.is_excluded = True, False
            group.view.place, group.view.made = place, group.view.done
        wire.send_line({"in": group.view.epoch})
    finally:
        wire.close()
    return state


def wait_for_beginners(group: Members, say: Say) -> list[Peer]:
    """Waits on worker 0, before the first step, for all other hosts still alive."""
    peers = []
    for rank in range(1, group.workers):
        try:
            peers.append(_wait_for_beginner(group, rank))
        except PeerLostError as lost:
            say(f"worker {rank} is lost: {lost.reason}")
    with group.changed:
        view = group.view
        view.epoch += 1
        view.members = (0, *(peer.hello.rank for peer in peers))
        for peer in peers:
            view.addresses[peer.hello.rank] = peer.address
    return peers


def _wait_for_beginner(group: Members, rank: int) -> Peer:
    deadline = time.monotonic() + group.timeout_seconds
    detector = _detector_of(group, rank)
    while True:
        with group.changed:
            if rank in group.listener.joiners():  # still connected
                peer = group.listener.take("join", rank)
                if peer is not None:
                    return peer
            group.changed.wait(RETRY_SECONDS)
        detector.check()
        if time.monotonic() >= deadline:
            raise PeerLostError(
                rank, f"it did not start within {group.timeout_seconds:g} seconds"
            )


def _detector_of(group: Members, rank: int) -> FailureDetector:
    return FailureDetector(
        rank, group.silence_seconds, lambda: group.query(rank) is not None
    )


def give_state(
    group: Members,
    peers: Sequence[Peer],
    arrays: list[np.ndarray],
    say: Say,
    admit: Callable[[Peer], None] | None = None,
) -> None:
    """Sends the state to all of them in parallel. They are members already; `admit`
    makes one that has the state a member instead."""

    def give(peer: Peer) -> None:
        rank = peer.hello.rank
        if peer.hello.terms != fingerprint_of_arrays(arrays):
            reason = (
                f"Worker {rank} trains another model or another optimizer than worker "
                f"{group.rank}. Give all workers the same."
            )
            send_and_close(peer.connection, {"refused": reason})
            say(reason)
            return
        detector = _detector_of(group, rank)
        wire = Watched(peer.connection, detector.check)
        try:
            with group.changed:
                members = set(group.view.members)
                if admit is not None:
                    group.view.addresses[rank] = peer.address
                    members.add(rank)
                agreement = group.agreement(sorted(members))
            wire.send_line(agreement)
            wire.send(*arrays)
            wire.receive_line()
            if admit is not None:
                admit(peer)
        except (OSError, ValueError) as error:
            # It joins again, or the next all-reduce detects its loss.
            say(f"worker {rank} did not receive the state: {error}")
        finally:
            wire.close()

    with concurrent.futures.ThreadPoolExecutor(len(peers)) as threads:
        list(threads.map(give, peers))


def wait_for_late_hosts(group: Members, give: Callable[[], None]) -> None:
    """Waits at the end of `fit` until each live host has made this host's updates.

    Meanwhile `give` gives the state to hosts that join. Ends as soon as another host
    goes on, which gives it then, and after `timeout_seconds` at the latest.
    """
    answers: dict[int, ViewReply] = {}
    deadline = time.monotonic() + group.timeout_seconds

    def look(rank: int) -> bool:
        answer = group.query(rank)
        if answer is not None:
            answers[rank] = answer
        elif rank not in group.view.members:
            raise PeerLostError(rank, "the group has lost it before")
        return answer is not None

    waits_for = {
        rank: FailureDetector(
            rank, group.silence_seconds, functools.partial(look, rank)
        )
        for rank in set(range(group.workers)) - {group.rank}
    }
    while waits_for and time.monotonic() < deadline:
        for rank, detector in list(waits_for.items()):
            try:
                detector.check()
            except PeerLostError:
                del waits_for[rank]
                group.drop(rank)
        found = [answers[rank] for rank in waits_for if rank in answers]
        made = group.view.made
        if any(max(one.made, one.at or 0) > made for one in found if one.is_in):
            return
        for rank in waits_for:
            if rank in answers and not answers[rank].is_in:
                group.drop(rank)  # the leader is among those that have the state
        are_all_here = all(one.is_in and one.made == made for one in found)
        if are_all_here and len(found) == len(waits_for):
            return
        give()
        time.sleep(RETRY_SECONDS)
