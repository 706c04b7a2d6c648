"""Pushes of gradients to the hosts that own the weights, and replies with the weights.

    a host, in its step                        an owner, in one thread per host

    generation, version, rate, places     ->
    its part of each gradient, or rows         applies it when it is its turn
                                          <-   the version, and its part of each weight

A generation is the time between two places at which all hosts meet. An owner lets a
push of the next generation wait until it has come there itself.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import math
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tfdp.checks import is_number
from tfdp.cluster.crash_report import note_lost_worker
from tfdp.cluster.worker_names import name_workers
from tfdp.errors import CollectiveError, WorkerLostError
from tfdp.hosts.connect import HANDSHAKE_SECONDS, SESSION_BYTES, dial, session_secret
from tfdp.hosts.elastic_transfers import DamagedArrayError, Watched
from tfdp.hosts.host_link import HostLink
from tfdp.hosts.listener import Listener, listen_at
from tfdp.hosts.messages import (
    MOST_CHARACTERS,
    MOST_PORT,
    checked_integer,
    checked_text,
    parse_object,
    read_as,
)
from tfdp.hosts.waits import NEWS_SECONDS, NOTICE_SECONDS, late_reason, log_waiting
from tfdp.plan.shards import ShardLayout

MOST_COUNT = 2**62
#: Where hosts meet to save, wherever another one waits.
SAVE = "save"
POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class IndexedRows:
    """Rows of a table: ascending indices of different rows, and their values."""

    indices: np.ndarray  # int64 [n]
    values: np.ndarray  # [n, elements of a row]


@dataclasses.dataclass(frozen=True)
class Push:
    """One host's push to one owner.

    Args:
      rank: of the host.
      version: the number of the owner's updates in the weights of the gradient.
      rate: the learning rate.
      parts: by the place of a weight, the owner's part, flat, or rows.
    """

    rank: int
    version: int
    rate: float
    parts: Mapping[int, np.ndarray | IndexedRows]


class Owner(Protocol):
    """Applies pushes; called from one thread."""

    version: int

    def apply(self, push: Push) -> None:
        """Updates the owner's part of the weights by a push."""

    def weights(self) -> list[np.ndarray]:
        """Copies of the owned parts."""


class Layouts:
    """How weights are cut: part o of each belongs to host o."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], hosts: int):
        self.whole = [ShardLayout(tuple(shape), hosts) for shape in shapes]

    def length(self, place: int, owner: int) -> int:
        return self.whole[place].length(owner)

    def row_elements(self, place: int) -> int:
        return max(math.prod(self.whole[place].shape[1:]), 1)

    def rows(self, place: int, owner: int) -> tuple[int, int]:
        """The first row of a table of which the owner has elements, and the end."""
        start, stop = self.whole[place].bounds(owner)
        width = self.row_elements(place)
        return start // width, -(-stop // width)

    def part_of(
        self, gradient: np.ndarray | IndexedRows, place: int, owner: int
    ) -> Any:
        """The owner's part of a whole gradient; of rows those that it has a part of."""
        if isinstance(gradient, IndexedRows):
            bounds = np.searchsorted(gradient.indices, self.rows(place, owner))
            return IndexedRows(
                gradient.indices[slice(*bounds)], gradient.values[slice(*bounds)]
            )
        return gradient.reshape(-1)[slice(*self.whole[place].bounds(owner))]

    def dense(
        self, part: np.ndarray | IndexedRows, place: int, owner: int
    ) -> np.ndarray:
        """The owner's part, flat, with zeros in rows that did not come."""
        if not isinstance(part, IndexedRows):
            return part
        first, end = self.rows(place, owner)
        start, stop = self.whole[place].bounds(owner)
        rows = np.zeros((end - first, self.row_elements(place)), part.values.dtype)
        rows[part.indices - first] = part.values
        offset = first * self.row_elements(place)
        return rows.reshape(-1)[start - offset : stop - offset]


class PushLink:
    """A host's connections to all others: it pushes, and serves as an owner.

    Args:
      link: of the hosts; all call this constructor at the same place.
      secret: see `job_secret`.
      dtypes: of the weights that `layouts` cuts.
      label: names it in errors.
      names: of the weights, for errors; None: their places.
    """

    def __init__(
        self,
        link: HostLink,
        secret: bytes,
        owner: Owner,
        layouts: Layouts,
        dtypes: Sequence[np.dtype],
        label: str,
        names: Sequence[str] | None = None,
    ):
        self._link, self._owner, self._label = link, owner, label
        self._layouts, self._dtypes = layouts, list(dtypes)
        self._names = names or [f"weight {n}" for n in range(len(self._dtypes))]
        #: Guards `generation`.
        self._changed = threading.Condition()
        self.generation = 0
        self._is_closed = False
        self._failure: str | None = None
        self._versions: dict[int, int] = {}
        self._turns = concurrent.futures.ThreadPoolExecutor(1, "tfdp-owner")
        self._wires: dict[int, Watched] = {}  # to owners
        self._connections: list[socket.socket] = []
        try:
            self._connect(secret)
        except BaseException:
            self.close()
            raise
        found = weakref.WeakMethod(self.close)
        link.on_failure(lambda reason: (found() or _nothing)())

    def _connect(self, secret: bytes) -> None:
        link = self._link
        listeners = listen_at(link.hosts[link.rank], 0)[:1]
        port = listeners[0].getsockname()[1]
        own = {"port": port, "session": secrets.token_hex(SESSION_BYTES)}
        label = f"ports of {self._label}"
        blobs = link.gather(json.dumps(own).encode(), label)
        told = [
            read_as(_parsed_place, blob, rank, "port")
            for rank, blob in enumerate(blobs)
        ]
        secret = session_secret(secret, bytes.fromhex(told[0][1]))
        deadline = time.monotonic() + link.timeout_seconds
        missing = set(range(link.workers)) - {link.rank}
        accepting = Listener(listeners, secret, "pushes", self._parsed_rank)
        with concurrent.futures.ThreadPoolExecutor(1) as dialing, accepting:
            addresses = {rank: (link.hosts[rank], told[rank][0]) for rank in missing}
            dialed = dialing.submit(self._dial, addresses, secret, deadline)
            try:
                while missing:
                    connection, _, rank = accepting.next_worker(deadline)
                    missing.discard(rank)
                    self._connections.append(connection)
                    self._serve_in_thread(rank, Watched(connection, self._check_open))
                dialed.result()
            except OSError as error:
                raise CollectiveError(
                    f"Worker {link.rank} could not connect with "
                    f"{name_workers(sorted(missing)) if missing else 'a worker'} for "
                    f"its pushes: {error}. Workers must reach each other directly; "
                    "check firewalls between them."
                ) from error

    def _dial(
        self, addresses: Mapping[int, tuple[str, int]], secret: bytes, deadline: float
    ) -> None:
        deadline += HANDSHAKE_SECONDS
        hello = {"rank": self._link.rank}
        for rank, address in addresses.items():
            connection = dial(address, secret, "pushes", lambda _: hello, deadline)
            self._connections.append(connection)
            self._wires[rank] = Watched(connection, self._check_open)

    def _parsed_rank(self, message: dict[str, Any]) -> int:
        rank = checked_integer(message.get("rank"), 0, self._link.workers - 1)
        if rank == self._link.rank:
            raise ValueError("this worker's own rank")
        return rank

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConnectionAbortedError(self._failure or "closed here")

    def begin(self) -> None:
        """Begins to accept pushes, on all hosts when the owner has its weights."""
        # Before others may push.
        everyone = range(self._link.workers)
        self._versions = dict.fromkeys(everyone, self._owner.version)
        with self._changed:
            self.generation += 1
            self._changed.notify_all()

    def push(
        self, rate: float, gradients: Mapping[int, np.ndarray | IndexedRows]
    ) -> list[np.ndarray]:
        """Pushes the parts of whole gradients to their owners; returns the weights.

        Without gradients it only pulls. Raises WorkerLostError, CollectiveError.
        """
        own, wires = self._link.rank, self._wires
        began = time.monotonic()
        for rank, wire in wires.items():
            wire.check = self._check_of(rank, began)
            with self._explaining(rank):
                self._send(wire, rank, rate, gradients)
        wholes = [
            np.empty(layout.elements, dtype)
            for layout, dtype in zip(self._layouts.whole, self._dtypes, strict=True)
        ]
        parts = self._parts_for(own, gradients)
        mine = Push(own, self._versions[own], rate, parts) if parts else None
        with self._explaining(own):
            self._versions[own], weights = self._in_turn(mine)
        self._put(wholes, own, weights)
        for rank, wire in wires.items():
            with self._explaining(rank):
                self._versions[rank] = self._receive(wire, rank, wholes)
        return [
            whole.reshape(layout.shape)
            for whole, layout in zip(wholes, self._layouts.whole, strict=True)
        ]

    def _parts_for(
        self, owner: int, gradients: Mapping[int, np.ndarray | IndexedRows]
    ) -> dict[int, np.ndarray | IndexedRows]:
        part_of = self._layouts.part_of
        return {place: part_of(g, place, owner) for place, g in gradients.items()}

    def _send(
        self, wire: Watched, owner: int, rate: float, gradients: Mapping[int, Any]
    ) -> None:
        parts = self._parts_for(owner, gradients)
        counts = [
            [place, len(part.indices) if isinstance(part, IndexedRows) else -1]
            for place, part in parts.items()
        ]
        message = {
            "generation": self.generation,
            "version": self._versions[owner],
            "rate": rate,
            "parts": counts,
        }
        wire.send_line(message)
        for part in parts.values():
            if isinstance(part, IndexedRows):
                wire.send(part.indices, part.values)
            else:
                wire.send(part)

    def _receive(self, wire: Watched, owner: int, wholes: list[np.ndarray]) -> int:
        message = wire.receive_line()
        version = checked_integer(message.get("version"), 0, MOST_COUNT)
        if version < self._versions[owner]:
            raise ValueError("an older version")
        for place, whole in enumerate(wholes):
            with self._naming("the value", place):
                wire.fill([whole[slice(*self._layouts.whole[place].bounds(owner))]])
        return version

    @contextlib.contextmanager
    def _naming(self, what: str, place: int) -> Iterator[None]:
        try:
            yield
        except (DamagedArrayError, ValueError) as error:
            raise ValueError(f"{what} of {self._names[place]}: {error}") from error

    def _put(self, wholes: list[np.ndarray], owner: int, weights: Any) -> None:
        for whole, layout, part in zip(
            wholes, self._layouts.whole, weights, strict=True
        ):
            whole[slice(*layout.bounds(owner))] = part

    def _check_of(self, owner: int, began: float) -> Callable[[], None]:
        """Returns the check to call in each second of a wait for `owner`."""

        def check() -> None:
            self._check_open()
            reason = self._link.news()
            seconds = self._link.timeout_seconds
            if reason is None and time.monotonic() - began > seconds:
                reason = late_reason(f"the answer of worker {owner}", seconds)
            if reason is not None:
                raise ConnectionError(reason)

        return check

    @contextlib.contextmanager
    def _explaining(self, owner: int) -> Any:
        began = time.monotonic()
        try:
            yield
        except (OSError, ValueError) as error:
            # The connection may break before the membership names the lost worker.
            until = began + NEWS_SECONDS
            reason = self._failure or self._link.news()
            while reason is None and not isinstance(error, ValueError):
                if time.monotonic() > until:
                    break
                time.sleep(POLL_SECONDS)
                reason = self._failure or self._link.news()
            reason = reason or f"its answer is none that a worker gives ({error})"
            raise self._lost(f"pushed to worker {owner}", reason) from error

    def _lost(self, did: str, reason: str) -> WorkerLostError:
        note_lost_worker()
        self._link.give_up(reason)
        self.close()
        return WorkerLostError(
            f"Worker {self._link.rank} {did} ({self._label}): {reason}. Training "
            "cannot go on without it; look at that worker's output for the first error."
        )

    def _in_turn(self, push: Push | None) -> tuple[int, list[np.ndarray]]:
        """Applies a push when those that came before it are applied."""

        def apply() -> tuple[int, list[np.ndarray]]:
            if push is not None:
                self._owner.apply(push)
            return self._owner.version, self._owner.weights()

        try:
            turn = self._turns.submit(apply)
        except RuntimeError as error:  # this process is about to end
            raise ConnectionAbortedError("closed here") from error
        return turn.result()

    # The owner's side.

    def _serve_in_thread(self, rank: int, wire: Watched) -> None:
        work = threading.Thread(
            target=self._serve, name="tfdp-pushes", args=(rank, wire), daemon=True
        )
        work.start()

    def _serve(self, rank: int, wire: Watched) -> None:
        """Applies the pushes of worker `rank` until its connection ends."""
        try:
            while True:
                push = self._accept(rank, wire)
                version, weights = self._in_turn(push)
                wire.send_line({"version": version})
                wire.send(*weights)
        except OSError:
            pass  # it has ended, or this host has
        except BaseException as error:
            if not self._is_closed:
                reason = f"a push of worker {rank} to worker {self._link.rank} failed"
                self._failure = f"{reason}: {type(error).__name__}: {error}"
                self._link.give_up(self._failure)
        finally:
            wire.close()

    def _accept(self, rank: int, wire: Watched) -> Push | None:
        """The next push; None for a pull. Raises ValueError if it is invalid."""
        message = wire.receive_line()
        # None is pushed before hosts have met for the first time.
        generation = checked_integer(message.get("generation"), 1, MOST_COUNT)
        version = checked_integer(message.get("version"), 0, MOST_COUNT)
        rate = message.get("rate")
        if not is_number(rate) or not math.isfinite(rate):
            raise ValueError("not a learning rate")
        counts = self._checked_counts(message.get("parts"))
        parts = {}
        for place, count in counts.items():
            with self._naming("the gradient", place):
                parts[place] = self._accept_part(wire, place, count)
        with self._changed:
            while self.generation < generation:
                self._check_open()
                self._changed.wait(POLL_SECONDS)
        if generation != self.generation or version > self._owner.version:
            raise ValueError(
                f"it is of generation {generation}, version {version}; here are "
                f"{self.generation} and {self._owner.version}"
            )
        return Push(rank, version, float(rate), parts) if parts else None

    def _checked_counts(self, pairs: Any) -> dict[int, int]:
        """Row count of each pushed variable; -1 means the owner's whole part."""
        if not isinstance(pairs, list):
            raise ValueError("not a list of parts")
        counts: dict[int, int] = {}
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2:
                raise ValueError("not a part")
            place = checked_integer(pair[0], 0, len(self._dtypes) - 1)
            first, end = self._layouts.rows(place, self._link.rank)
            if place in counts:
                raise ValueError("a part that came twice")
            counts[place] = checked_integer(pair[1], -1, max(end - first, 0))
        return counts

    def _accept_part(
        self, wire: Watched, place: int, count: int
    ) -> np.ndarray | IndexedRows:
        own, layouts, dtype = self._link.rank, self._layouts, self._dtypes[place]
        if count < 0:
            part = np.empty(layouts.length(place, own), dtype)
            wire.fill([part])
            return part
        indices = np.empty(count, np.int64)
        values = np.empty((count, layouts.row_elements(place)), dtype)
        wire.fill([indices, values])
        first, end = layouts.rows(place, own)
        if count and not (
            first <= indices[0] and indices[-1] < end and np.all(np.diff(indices) > 0)
        ):
            raise ValueError("not the rows of a table")
        return IndexedRows(indices, values)

    # Where all hosts meet.

    def meet(self, where: str, poll: Callable[[], None] = lambda: None) -> bool:
        """Waits until all hosts are here, and so all pushes are applied.

        Calls `poll` again and again. Returns whether another host is there to save
        (`SAVE`), and this one elsewhere: it saves, too, and comes again. Raises
        WorkerLostError when one is dead, or has neither come nor pushed for
        `timeout_seconds`, naming it; CollectiveError when hosts meet elsewhere.
        """
        link, everyone = self._link, self._link.workers
        key = f"meeting {self.generation} of {self._label}"
        notes: dict[int, str] = {}
        all_here = threading.Event()

        def hear(heard: dict[int, str]) -> None:
            notes.update(heard)
            if len(notes) == everyone:
                all_here.set()

        link.leave_note(key, where)
        link.on_note(key, hear)
        seen, since = self._owner.version, time.monotonic()
        notice = since + NOTICE_SECONDS
        while not all_here.wait(POLL_SECONDS) or self._failure:
            now, reason = time.monotonic(), self._failure or link.news()
            missing = sorted(set(range(everyone)) - notes.keys())
            poll()
            if seen != self._owner.version:
                seen, since = self._owner.version, now
            if reason is None and now - since > link.timeout_seconds:
                reason = late_reason(name_workers(missing), link.timeout_seconds)
            if reason is not None:
                raise self._lost(f"waited at the {where}", reason)
            if now > notice:
                log_waiting(link.rank, NOTICE_SECONDS, f"the {where}", missing)
                notice = math.inf
        if SAVE in notes.values():
            return where != SAVE
        if len(set(notes.values())) > 1:
            places = "; ".join(f"worker {r} at the {notes[r]}" for r in sorted(notes))
            raise CollectiveError(
                f"Workers meet at different places: {places}. All must call fit, "
                "evaluate, predict and checkpoints after the same steps."
            )
        return False

    def close(self) -> None:
        """Ends all connections."""
        self._failure = self._failure or self._link.news()
        self._is_closed = True
        # Not `close`: a thread may wait on them, and numbers of files are used again.
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._turns.shutdown(wait=False)


def _nothing() -> None:
    """Does nothing, in place of the `close` of an object that is gone."""


def _parsed_place(blob: bytes | memoryview) -> tuple[int, str]:
    message = parse_object(bytes(blob))
    port = checked_integer(message.get("port"), 1, MOST_PORT)
    session = checked_text(message.get("session"), MOST_CHARACTERS)
    bytes.fromhex(session)
    return port, session
