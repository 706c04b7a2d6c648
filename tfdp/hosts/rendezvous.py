"""The workers meet at worker 0, learn each other's addresses and connect.

    worker r   dials worker 0, proves the job's secret, says its rank and data port
    worker 0   "until when I wait"; once all are there, the table of data ports and a
               random number, the session, which nobody else is told
    all        dial the data ports of their neighbours (`tfdp.hosts.rendezvous`), with
               the session's secret; those of one machine agree on memory that they
               share (`tfdp.hosts.shared_memory`)

Whoever fails at a door is ignored (`tfdp.hosts.listener`); a worker of the job that
does not fit (another tfdp, another number of workers, a rank that is taken) ends the
meeting, with the reason on all sides.
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
from itertools import chain
from typing import Any

from tfdp._version import __version__
from tfdp.cluster.addresses import unknown_name_seconds
from tfdp.cluster.description import join_address, split_address
from tfdp.errors import CollectiveError
from tfdp.hosts.connect import (
    HANDSHAKE_SECONDS,
    Hello,
    StrangerError,
    dial,
    session_secret,
)
from tfdp.hosts.listener import Listener, listen, listen_at, local_address
from tfdp.hosts.messages import (
    checked_integer,
    checked_seconds,
    checked_text,
    raise_if_refused,
)
from tfdp.hosts.shared_memory import NoAnswer, SharedMemory, share_memory
from tfdp.hosts.wire import has_ended, read_line, write_line
from tfdp.hosts.worker_names import name_workers
from tfdp.plan.sum_ways import distances

MOST_WORKERS = 1 << 20
MOST_PORT = 65535
# Of a name in the network, of a version.
MOST_CHARACTERS = 255
MOST_WAIT_SECONDS = 7 * 24 * 3600.0
SESSION_BYTES = 32


@dataclasses.dataclass
class WorkerConnections:
    """The connections of one worker after all have met.

    Args:
      control: to every other worker by rank (on worker 0), else to worker 0.
      neighbours: by channel, by distance 1, 2, 4 ..., (to the worker so far after,
        from the worker so far before).
      shared: by channel, the memory that it shares with those next to it.
      hosts: where this worker reaches each of the others, by rank.
    """

    control: dict[int, socket.socket]
    neighbours: list[list[Pair]]
    shared: list[SharedMemory]
    hosts: list[str]


@dataclasses.dataclass(frozen=True)
class _Hello:
    """What a worker says of itself to worker 0."""

    rank: int
    workers: int
    version: str
    port: int
    checksum: bool


@dataclasses.dataclass
class _Party:
    """What a worker has before it knows its neighbours."""

    control: dict[int, socket.socket]
    addresses: list[Address]
    listener: socket.socket
    session: bytes


def parse_address(address: str) -> Address:
    """Host and port of "host:port", or of "[host]:port" for an IPv6 address.

    Raises:
      CollectiveError: when it is not of that form.
    """
    found = split_address(address)
    if found is None:
        raise CollectiveError(
            "A coordinator address is 'host:port', with an IPv6 host in brackets. "
            f"Received: {address!r}."
        )
    return found


def meet(
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
      rank: this worker, 0 to workers - 1.
      workers: how many there are, at least 2.
      coordinator: "host:port" where worker 0 listens.
      channels: how many sets of connections to make; each keeps an order of its own.
      timeout_seconds: how long to wait for the others.
      secret: what all workers of the job know; see `job_secret`.
      present: is given the ranks of those who have come, on worker 0.
      checksum: whether this worker sends checksums, which all have to do alike.

    Raises:
      CollectiveError: when not all came in time (it names who was missing), or when
        one has another number of workers, another tfdp, or a rank that is taken.
    """
    deadline = time.monotonic() + timeout_seconds
    address = parse_address(coordinator)
    with contextlib.ExitStack() as on_failure:
        if rank == 0:
            present = set() if present is None else present
            party = _receive_all(
                workers, address, secret, deadline, present, checksum, on_failure
            )
        else:
            party = _join(
                rank, workers, address, secret, deadline, checksum, on_failure
            )
        # Who came first may have used up its time while it waited for the others.
        deadline = max(deadline, time.monotonic() + HANDSHAKE_SECONDS)
        neighbours = connect_neighbours(
            rank,
            party.addresses,
            party.listener,
            channels,
            session_secret(secret, party.session),
            deadline,
        )
        on_failure.callback(lambda: _close_all(chain(*chain(*neighbours))))
        shared = _share_memory(rank, workers, neighbours, deadline)
        on_failure.pop_all()
    hosts = [host for host, _ in party.addresses]
    return WorkerConnections(party.control, neighbours, shared, hosts)


def _share_memory(
    rank: int, workers: int, neighbours: list[list[Pair]], deadline: float
) -> list[SharedMemory]:
    try:
        # Those farther away get what is short; see `tfdp.plan.sum_ways`.
        return share_memory([nearest for nearest, *_ in neighbours], deadline)
    except NoAnswer as error:
        who = (rank + (1 if error.is_after else -1)) % workers
        raise CollectiveError(
            f"Worker {rank} met worker {who}, which then did not say whether it shares "
            f"memory with it: {error}. See its output for the first error."
        ) from error


def _receive_all(
    workers: int,
    address: Address,
    secret: bytes,
    deadline: float,
    present: set[int],
    checksum: bool,
    on_failure: contextlib.ExitStack,
) -> _Party:
    control: dict[int, socket.socket] = {}
    addresses: dict[int, Address] = {}
    on_failure.callback(lambda: _close_all(control.values()))
    with Listener(listen_at(*address), secret, "meeting", _parse_hello) as door:
        while len(control) < workers - 1:
            try:
                connection, host, hello = door.next_worker(deadline)
            except TimeoutError:
                missing = sorted(set(range(1, workers)) - control.keys())
                _refuse_all(control, _missing_workers(missing, workers) + door.words())
            # Who has left may come again: started anew, or too late the first time.
            _drop_ended(control)
            reason = _why_refused(hello, workers, checksum, control)
            if reason is not None:
                _tell(connection, {"refused": reason})
                connection.close()
                _refuse_all(control, reason)
            # Worker 0 may have begun later than this one: it says until when it waits,
            # so that the other is still there to be told who was missing.
            _tell(connection, {"wait_seconds": max(deadline - time.monotonic(), 0.0)})
            control[hello.rank] = connection
            addresses[hello.rank] = (host, hello.port)
            _drop_ended(control)
            present &= {0, *control}
            present |= {0, *control}
    # On the interface on which the one came who will dial it.
    at = local_address(control[workers - 1])
    listener = on_failure.enter_context(listen(at))
    port = listener.getsockname()[1]
    session = secrets.token_bytes(SESSION_BYTES)
    table = [addresses[rank] for rank in range(1, workers)]
    for connection in control.values():
        # Worker 0 itself is where the others found it.
        message = {"addresses": table, "port_of_0": port, "session": session.hex()}
        _tell(connection, message)
    return _Party(control, [(at[0], port), *table], listener, session)


def _parse_hello(words: dict[str, Any]) -> _Hello:
    workers = checked_integer(words.get("workers"), 2, MOST_WORKERS)
    return _Hello(
        rank=checked_integer(words.get("rank"), 1, workers - 1),
        workers=workers,
        version=checked_text(words.get("version"), MOST_CHARACTERS),
        port=checked_integer(words.get("port"), 1, MOST_PORT),
        checksum=words.get("checksum") is True,
    )


def _why_refused(
    hello: _Hello, workers: int, checksum: bool, present: dict[int, socket.socket]
) -> str | None:
    for theirs, mine, words in (
        (hello.workers, workers, "workers"),
        (hello.version, __version__, "the tfdp version"),
        (hello.checksum, checksum, "Communication.checksum"),
    ):
        if theirs != mine:
            return (
                f"Worker {hello.rank} says {words}={theirs}, worker 0 says {mine}. "
                "Start all workers with the same settings and the same tfdp."
            )
    if hello.rank in present:
        return (
            f"Two workers say that they are worker {hello.rank} of {workers}. Give "
            "each process a rank of its own."
        )
    return None


def _missing_workers(missing: list[int], workers: int) -> str:
    return (
        f"Not all {workers} workers came together: {name_workers(missing)} did not "
        "arrive at worker 0 in time. See their output; check that they can reach the "
        "coordinator's address."
    )


def _refuse_all(control: dict[int, socket.socket], reason: str) -> None:
    for connection in control.values():
        _tell(connection, {"refused": reason})
    raise CollectiveError(reason)


def _tell(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.settimeout(HANDSHAKE_SECONDS)
    # Whoever is gone is missed where it is needed.
    with contextlib.suppress(OSError):
        write_line(connection, message)


def _drop_ended(control: dict[int, socket.socket]) -> None:
    for rank in [rank for rank, end in control.items() if has_ended(end)]:
        control.pop(rank).close()


def _join(
    rank: int,
    workers: int,
    coordinator: Address,
    secret: bytes,
    deadline: float,
    checksum: bool,
    on_failure: contextlib.ExitStack,
) -> _Party:
    listener: socket.socket | None = None

    def hello(connection: socket.socket) -> dict[str, Any]:
        nonlocal listener
        if listener is not None:
            listener.close()
        # On the interface that leads to worker 0.
        listener = on_failure.enter_context(listen(local_address(connection)))
        port = listener.getsockname()[1]
        return dataclasses.asdict(_Hello(rank, workers, __version__, port, checksum))

    where = join_address(*coordinator)
    connection = _dial_worker_0(rank, coordinator, secret, hello, deadline)
    on_failure.callback(connection.close)
    try:
        remaining = max(deadline, time.monotonic()) + HANDSHAKE_SECONDS
        answer = read_line(connection, remaining)
        if "wait_seconds" in answer:
            wait_seconds = checked_seconds(answer["wait_seconds"], MOST_WAIT_SECONDS)
            until = time.monotonic() + wait_seconds + HANDSHAKE_SECONDS
            answer = read_line(connection, until)
        raise_if_refused(answer)
        own_host = connection.getpeername()[0]
        addresses, session = _parse_table(answer, workers, own_host)
    except (OSError, ValueError) as error:
        raise CollectiveError(
            f"Worker {rank} reached worker 0 at {where}, which did not answer in time: "
            f"not all workers came, or it has ended ({error}). See its output."
        ) from error
    if listener is None:
        raise CollectiveError(f"Worker {rank} does not listen.")
    return _Party({0: connection}, addresses, listener, session)


def _dial_worker_0(
    rank: int, coordinator: Address, secret: bytes, hello: Hello, deadline: float
) -> socket.socket:
    where = join_address(*coordinator)
    try:
        return dial(
            coordinator,
            secret,
            "meeting",
            hello,
            deadline,
            name_seconds=unknown_name_seconds(),
        )
    except StrangerError as error:
        raise CollectiveError(
            f"Worker {rank} reached {where}, but did not find worker 0 of its job "
            f"there: {error}. Give all workers the same TFDP_JOB_KEY; see whether "
            "another job or another program listens there."
        ) from error
    except socket.gaierror as error:
        raise CollectiveError(
            f"Worker {rank} does not know where worker 0 is: the name "
            f"{coordinator[0]!r} cannot be looked up here ({error.strerror}). Set "
            "TFDP_COORDINATOR=ADDRESS:PORT on all workers, with an address of worker 0 "
            "in numbers, or make the name known on all hosts."
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
        raise ValueError("no table of addresses")
    addresses = [(host_of_0, checked_integer(answer.get("port_of_0"), 1, MOST_PORT))]
    for entry in table:
        if not isinstance(entry, list) or len(entry) != 2:
            raise ValueError("no address")
        host, port = entry
        addresses.append(
            (checked_text(host, MOST_CHARACTERS), checked_integer(port, 1, MOST_PORT))
        )
    session = bytes.fromhex(checked_text(answer.get("session"), 2 * SESSION_BYTES))
    return addresses, session


def _close_all(connections: Any) -> None:
    for connection in connections:
        connection.close()


# Each worker's connections to those 1, 2, 4 ... places after it and before it.
#
#     p workers, c channels:   2 c ceil(log2 p) connections of each worker, half of them
#                              dialed by it
#
# A sum of many workers needs a round for each distance; in a ring, which is the
# distance 1 alone, it would need one for each worker.


Address = tuple[str, int]
Pair = tuple[socket.socket, socket.socket]
# Channel, and distance.
Place = tuple[int, int]


def connect_neighbours(
    rank: int,
    addresses: Sequence[Address],
    listener: socket.socket,
    channels: int,
    secret: bytes,
    deadline: float,
) -> list[list[Pair]]:
    """Dials the workers after this one, from a thread, while those before dial it.

    Args:
      rank: this worker.
      addresses: of all workers' data ports, by rank.
      listener: at this worker's; closed here.
      channels: how many sets of connections to make.
      secret: of the session; see `session_secret`.
      deadline: for all of it (`time.monotonic`).

    Returns:
      By channel, by distance: to the worker so far after, from the one so far before.

    Raises:
      CollectiveError: when not all of them are there in time; it names who is missing.
    """
    workers = len(addresses)
    places = list(itertools.product(range(channels), distances(workers)))
    after: dict[Place, socket.socket] = {}
    before: dict[Place, socket.socket] = {}
    given_up = threading.Event()

    def parse(words: dict[str, Any]) -> Place:
        channel = checked_integer(words.get("channel"), 0, channels - 1)
        distance = checked_integer(words.get("distance"), 1, workers - 1)
        if (channel, distance) not in places:
            raise ValueError("a distance that there is not")
        source = (rank - distance) % workers
        checked_integer(words.get("rank"), source, source)
        return channel, distance

    door = Listener([listener], secret, "ring", parse)
    with concurrent.futures.ThreadPoolExecutor(1) as dialing, door:
        dialed = dialing.submit(
            _dial_all, rank, addresses, places, after, secret, deadline, given_up
        )
        try:
            _accept_neighbours(door, places, before, deadline)
            door.close()
            dialed.result()
        except BaseException as error:
            given_up.set()
            concurrent.futures.wait([dialed])
            _close_neighbours([*after.values(), *before.values()])
            if not isinstance(error, OSError):
                raise
            missing = {(rank - d) % workers for c, d in places if (c, d) not in before}
            # One is dialed after the other: who comes later may well be there.
            dialing_now = [d for c, d in places if (c, d) not in after][:1]
            missing |= {(rank + d) % workers for d in dialing_now}
            raise CollectiveError(
                f"Worker {rank} could not connect with its neighbours, "
                f"{_with_addresses(sorted(missing), addresses)}: {error}."
                f"{door.words()} Workers must reach each other directly; check "
                "firewalls between them."
            ) from error
    return [
        [(after[channel, d], before[channel, d]) for d in distances(workers)]
        for channel in range(channels)
    ]


def _with_addresses(ranks: Sequence[int], addresses: Sequence[Address]) -> str:
    where = ", ".join(join_address(*addresses[rank]) for rank in ranks)
    return f"{name_workers(ranks)} at {where}"


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
    door: Listener[Place],
    places: Sequence[Place],
    before: dict[Place, socket.socket],
    deadline: float,
) -> None:
    while len(before) < len(places):
        connection, _, place = door.next_worker(deadline)
        earlier = before.get(place)
        if earlier is not None and not has_ended(earlier):
            connection.close()
            continue
        before[place] = connection


def _close_neighbours(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()
