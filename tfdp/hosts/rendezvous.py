"""Rendezvous: the workers register at worker 0, get all addresses and connect.

    worker r   connects to worker 0, authenticates, sends its rank and data port
    worker 0   replies how long it will wait; when all are there it sends the table of
               data ports and a random session secret
    all        connect to their neighbors' data ports with the session secret; those on
               one machine agree on shared memory (`tfdp.hosts.shared_memory`)

Connections that fail to authenticate are ignored (`tfdp.hosts.listener`). A worker of
the job that does not fit (tfdp version, number of workers, a duplicate rank) ends the
rendezvous on all workers, with the reason.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

from tfdp._version import __version__
from tfdp.cluster.addresses import unknown_name_seconds
from tfdp.cluster.description import join_address, split_address
from tfdp.cluster.worker_names import name_workers
from tfdp.errors import CollectiveError
from tfdp.hosts.connect import (
    HANDSHAKE_SECONDS,
    SESSION_BYTES,
    Hello,
    StrangerError,
    dial,
    session_secret,
)
from tfdp.hosts.listener import Listener, listen, listen_at, local_address
from tfdp.hosts.messages import (
    MOST_CHARACTERS,
    MOST_PORT,
    MOST_WORKERS,
    checked_address,
    checked_integer,
    checked_seconds,
    checked_text,
    missing_workers,
    raise_if_refused,
    rank_is_taken,
    setting_mismatch,
)
from tfdp.hosts.shared_memory import NoAnswer, SharedMemory, share_memory
from tfdp.hosts.wire import has_ended, read_line, write_line
from tfdp.plan.sum_ways import distances

MOST_WAIT_SECONDS = 7 * 24 * 3600.0

Address = tuple[str, int]
Pair = tuple[socket.socket, socket.socket]
Place = tuple[int, int]  # channel, distance
# Control connections, addresses by rank, listener of the data port, session.
_Registered = tuple[dict[int, socket.socket], list[Address], socket.socket, bytes]


@dataclasses.dataclass
class WorkerConnections:
    """One worker's connections after the rendezvous."""

    control: dict[int, socket.socket]  # on worker 0 to all others, else to worker 0
    # By channel and distance 1, 2, 4 ...: (to the worker after, from the one before).
    neighbours: list[list[Pair]]
    shared: list[SharedMemory]  # with the ring neighbors, by channel
    hosts: list[str]  # by rank, the address at which this worker reaches it


@dataclasses.dataclass(frozen=True)
class _Hello:
    rank: int
    workers: int
    version: str
    port: int
    checksum: bool


def parse_address(address: str) -> Address:
    """(host, port) of "host:port" or "[IPv6 host]:port"; else a CollectiveError."""
    found = split_address(address)
    if found is None:
        raise CollectiveError(
            "A coordinator address is 'host:port', with an IPv6 host in brackets. "
            f"Received: {address!r}."
        )
    return found


def connect_workers(
    rank: int,
    workers: int,
    coordinator: str,
    channels: int,
    timeout_seconds: float,
    secret: bytes = b"",
    present: set[int] | None = None,
    checksum: bool = False,
) -> WorkerConnections:
    """Connects this worker with all others.

    Args:
      coordinator: "host:port" where worker 0 listens.
      channels: how many sets of connections to make.
      secret: see `job_secret`.
      present: on worker 0, receives the ranks that have arrived.
      checksum: whether this worker sends checksums.

    Raises CollectiveError if workers are missing (named), differ in number of workers,
    checksum or tfdp version, or have the same rank.
    """
    deadline = time.monotonic() + timeout_seconds
    address = parse_address(coordinator)
    own = _Hello(rank, workers, __version__, 0, checksum)
    with ExitStack() as on_failure:
        common = (own, address, secret, deadline, on_failure)
        if rank == 0:
            registered = _receive_all(*common, set() if present is None else present)
        else:
            registered = _register(*common)
        control, addresses, listener, session = registered
        # The first workers may have used up their time waiting for the others.
        deadline = max(deadline, time.monotonic() + HANDSHAKE_SECONDS)
        secret = session_secret(secret, session)
        neighbours = connect_neighbours(
            rank, addresses, listener, channels, secret, deadline
        )
        on_failure.callback(lambda: _close_all(chain(*chain(*neighbours))))
        try:
            # Only the ring sends much; see `tfdp.plan.sum_ways`.
            shared = share_memory([nearest for nearest, *_ in neighbours], deadline)
        except NoAnswer as error:
            peer = (rank + (1 if error.is_after else -1)) % workers
            raise CollectiveError(
                f"Worker {rank} connected to worker {peer}, which then did not say "
                f"whether they share memory: {error}. See its output for the first "
                "error."
            ) from error
        on_failure.pop_all()
    hosts = [host for host, _ in addresses]
    return WorkerConnections(control, neighbours, shared, hosts)


def _receive_all(
    own: _Hello,
    address: Address,
    secret: bytes,
    deadline: float,
    on_failure: ExitStack,
    present: set[int],
) -> _Registered:
    workers = own.workers
    control: dict[int, socket.socket] = {}
    addresses: dict[int, Address] = {}
    on_failure.callback(lambda: _close_all(control.values()))
    with Listener(listen_at(*address), secret, "meeting", _parse_hello) as listener_0:
        while len(control) < workers - 1:
            try:
                connection, host, hello = listener_0.next_worker(deadline)
            except TimeoutError:
                missing = sorted(set(range(1, workers)) - control.keys())
                why = missing_workers(missing, workers) + listener_0.rejections()
                _refuse_all(control, why)
            # A worker that has left may return: restarted, or too late at first.
            _drop_ended(control)
            reason = setting_mismatch(
                hello.rank,
                (hello.workers, workers, "workers"),
                (hello.version, own.version, "the tfdp version"),
                (hello.checksum, own.checksum, "Communication.checksum"),
            )
            if reason is None and hello.rank in control:
                reason = rank_is_taken(hello.rank, workers)
            if reason is not None:
                _tell(connection, {"refused": reason})
                connection.close()
                _refuse_all(control, reason)
            # Worker 0 may have started later than the other one: it sends how long it
            # waits, so that the other stays and can receive the reason for a failure.
            _tell(connection, {"wait_seconds": max(deadline - time.monotonic(), 0.0)})
            control[hello.rank] = connection
            addresses[hello.rank] = (host, hello.port)
            _drop_ended(control)
            present &= {0, *control}
            present |= {0, *control}
    # On the interface that worker 0's dialer has reached.
    at = local_address(control[workers - 1])
    listener = on_failure.enter_context(listen(at))
    port = listener.getsockname()[1]
    session = secrets.token_bytes(SESSION_BYTES)
    table = [addresses[rank] for rank in range(1, workers)]
    # Others use the address at which they found worker 0.
    message = {"addresses": table, "port_of_0": port, "session": session.hex()}
    for connection in control.values():
        _tell(connection, message)
    return control, [(at[0], port), *table], listener, session


def _parse_hello(message: dict[str, Any]) -> _Hello:
    workers = checked_integer(message.get("workers"), 2, MOST_WORKERS)
    return _Hello(
        rank=checked_integer(message.get("rank"), 1, workers - 1),
        workers=workers,
        version=checked_text(message.get("version"), MOST_CHARACTERS),
        port=checked_integer(message.get("port"), 1, MOST_PORT),
        checksum=message.get("checksum") is True,
    )


def _refuse_all(control: dict[int, socket.socket], reason: str) -> None:
    for connection in control.values():
        _tell(connection, {"refused": reason})
    raise CollectiveError(reason)


def _tell(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.settimeout(HANDSHAKE_SECONDS)
    # A dead peer is detected later, when it is needed.
    with contextlib.suppress(OSError):
        write_line(connection, message)


def _drop_ended(control: dict[int, socket.socket]) -> None:
    for rank in [rank for rank, end in control.items() if has_ended(end)]:
        control.pop(rank).close()


def _register(
    own: _Hello, address: Address, secret: bytes, deadline: float, on_failure: ExitStack
) -> _Registered:
    listener: socket.socket | None = None

    def hello(connection: socket.socket) -> dict[str, Any]:
        nonlocal listener
        if listener is not None:
            listener.close()
        # On the interface that reaches worker 0.
        listener = on_failure.enter_context(listen(local_address(connection)))
        port = listener.getsockname()[1]
        return dataclasses.asdict(dataclasses.replace(own, port=port))

    connection = _dial_worker_0(own.rank, address, secret, hello, deadline)
    on_failure.callback(connection.close)
    try:
        remaining = max(deadline, time.monotonic()) + HANDSHAKE_SECONDS
        answer = read_line(connection, remaining)
        if "wait_seconds" in answer:
            wait_seconds = checked_seconds(answer["wait_seconds"], MOST_WAIT_SECONDS)
            until = time.monotonic() + wait_seconds + HANDSHAKE_SECONDS
            answer = read_line(connection, until)
        raise_if_refused(answer)
        host_of_0 = connection.getpeername()[0]
        addresses, session = _parse_table(answer, own.workers, host_of_0)
    except (OSError, ValueError) as error:
        raise CollectiveError(
            f"Worker {own.rank} reached worker 0 at {join_address(*address)}, which "
            "did not answer in time: not all workers came, or it has ended "
            f"({error}). See its output."
        ) from error
    if listener is None:
        raise CollectiveError(f"Worker {own.rank} does not listen.")
    return {0: connection}, addresses, listener, session


def _dial_worker_0(
    rank: int, address: Address, secret: bytes, hello: Hello, deadline: float
) -> socket.socket:
    where, seconds = join_address(*address), unknown_name_seconds()
    try:
        return dial(address, secret, "meeting", hello, deadline, name_seconds=seconds)
    except StrangerError as error:
        raise CollectiveError(
            f"Worker {rank} reached {where}, but did not find worker 0 of its job "
            f"there: {error}. Give all workers the same TFDP_JOB_KEY; see whether "
            "another job or another program listens there."
        ) from error
    except socket.gaierror as error:
        raise CollectiveError(
            f"Worker {rank} cannot reach worker 0: the name {address[0]!r} cannot "
            f"be looked up here ({error.strerror}). Set TFDP_COORDINATOR=ADDRESS:PORT "
            "on all workers, with a numeric address of worker 0, or make the name "
            "resolvable on all hosts."
        ) from error
    except OSError as error:
        raise CollectiveError(
            f"Worker {rank} found no worker 0 at {where}: {error}. Start worker 0, "
            "and check the address and the firewall."
        ) from error


def _parse_table(
    answer: dict[str, Any], workers: int, host_of_0: str
) -> tuple[list[Address], bytes]:
    table = answer.get("addresses")
    if not isinstance(table, list) or len(table) != workers - 1:
        raise ValueError("not a table of addresses")
    addresses = [
        checked_address(entry)
        for entry in [[host_of_0, answer.get("port_of_0")], *table]
    ]
    session = bytes.fromhex(checked_text(answer.get("session"), 2 * SESSION_BYTES))
    return addresses, session


def _close_all(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()


def connect_neighbours(
    rank: int,
    addresses: Sequence[Address],
    listener: socket.socket,
    channels: int,
    secret: bytes,
    deadline: float,
) -> list[list[Pair]]:
    """Connects to the workers 1, 2, 4 ... ranks after this one; accepts those before.

    2 c ceil(log2 p) connections for p workers and c channels: a small sum takes a round
    per distance; a ring, which is distance 1 alone, would take one per worker.

    `addresses` are of the data ports; `listener` is this worker's, closed here. Raises
    CollectiveError if neighbors (named) did not connect in time.
    """
    workers = len(addresses)
    places = list(itertools.product(range(channels), distances(workers)))
    after: dict[Place, socket.socket] = {}
    before: dict[Place, socket.socket] = {}
    given_up = threading.Event()

    def parse(message: dict[str, Any]) -> Place:
        channel = checked_integer(message.get("channel"), 0, channels - 1)
        distance = checked_integer(message.get("distance"), 1, workers - 1)
        if (channel, distance) not in places:
            raise ValueError("an unused distance")
        source = (rank - distance) % workers
        checked_integer(message.get("rank"), source, source)
        return channel, distance

    accepting = Listener([listener], secret, "ring", parse)
    with concurrent.futures.ThreadPoolExecutor(1) as dialing, accepting:
        dialed = dialing.submit(
            _dial_all, rank, addresses, places, after, secret, deadline, given_up
        )
        try:
            _accept_neighbours(accepting, places, before, deadline)
            accepting.close()
            dialed.result()
        except BaseException as error:
            given_up.set()
            concurrent.futures.wait([dialed])
            _close_all([*after.values(), *before.values()])
            if not isinstance(error, OSError):
                raise
            missing = {(rank - d) % workers for c, d in places if (c, d) not in before}
            # Dialed one after the other: later ones may well be there.
            dialing_now = [d for c, d in places if (c, d) not in after][:1]
            missing |= {(rank + d) % workers for d in dialing_now}
            ranks = sorted(missing)
            where = ", ".join(join_address(*addresses[each]) for each in ranks)
            raise CollectiveError(
                f"Worker {rank} could not connect with its neighbours, "
                f"{name_workers(ranks)} at {where}: {error}.{accepting.rejections()} "
                "Workers must reach each other directly; check firewalls between them."
            ) from error
    return [
        [(after[channel, d], before[channel, d]) for d in distances(workers)]
        for channel in range(channels)
    ]


def _dial_all(
    rank: int,
    addresses: Sequence[Address],
    places: Sequence[Place],
    after: dict[Place, socket.socket],
    secret: bytes,
    deadline: float,
    given_up: threading.Event,
) -> None:
    for channel, distance in places:
        hello = {"rank": rank, "channel": channel, "distance": distance}
        after[channel, distance] = dial(
            addresses[(rank + distance) % len(addresses)],
            secret,
            "ring",
            lambda _, hello=hello: hello,  # type: ignore[misc]
            deadline,
            given_up,
        )


def _accept_neighbours(
    listener: Listener[Place],
    places: Sequence[Place],
    before: dict[Place, socket.socket],
    deadline: float,
) -> None:
    while len(before) < len(places):
        connection, _, place = listener.next_worker(deadline)
        if place in before and not has_ended(before[place]):
            connection.close()
        else:
            before[place] = connection
