"""The workers meet at worker 0, learn each other's addresses and form rings."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from typing import Any

from tfdp._version import __version__
from tfdp.errors import CollectiveError
from tfdp.hosts.wire import connect, listen, read_line, tuned, write_line

__all__ = ["Meeting", "meet", "parse_address"]

HANDSHAKE_SECONDS = 5.0


@dataclasses.dataclass
class Meeting:
    """The connections of one worker after all have met.

    Args:
      control: to every other worker by rank (on worker 0), else to worker 0.
      rings: for each channel, (to the next worker, from the worker before).
      hosts: where this worker reaches each of the others, by rank.
    """

    control: dict[int, socket.socket]
    rings: list[tuple[socket.socket, socket.socket]]
    hosts: list[str]


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port".

    Raises:
      CollectiveError: when it is not of that form.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise CollectiveError(
            f"A coordinator address is 'host:port'. Received: {address!r}."
        )
    return host, int(port)


def meet(
    rank: int,
    workers: int,
    coordinator: str,
    channels: int,
    timeout_seconds: float,
    present: set[int] | None = None,
) -> Meeting:
    """Connects this worker with all others.

    Args:
      rank: this worker, 0 to workers - 1.
      workers: how many there are, at least 2.
      coordinator: "host:port" where worker 0 listens.
      channels: how many rings to form; each keeps an order of its own.
      timeout_seconds: how long to wait for the others.
      present: gets the rank of everybody who comes, on worker 0.

    Raises:
      CollectiveError: when not all came in time (it names who was missing), or when
        one has another number of workers, another tfdp, or a rank that is taken.
    """
    deadline = time.monotonic() + timeout_seconds
    host, port = parse_address(coordinator)
    with listen("", 0) as data_listener:
        me = {
            "rank": rank,
            "workers": workers,
            "version": __version__,
            "port": data_listener.getsockname()[1],
        }
        if rank == 0:
            control, addresses = _receive_all(me, port, deadline, present)
        else:
            control, addresses = _join(me, (host, port), deadline)
        # Who came first may have used up its time while it waited for the others.
        deadline = max(deadline, time.monotonic() + HANDSHAKE_SECONDS)
        rings = _form_rings(rank, addresses, channels, data_listener, deadline)
    return Meeting(control, rings, [host for host, _ in addresses])


def _receive_all(
    me: dict[str, Any], port: int, deadline: float, present: set[int] | None
) -> tuple[dict[int, socket.socket], list[tuple[str, int]]]:
    workers = me["workers"]
    control: dict[int, socket.socket] = {}
    addresses: dict[int, tuple[str, int]] = {}
    with listen("", port) as listener:
        while len(control) < workers - 1:
            try:
                listener.settimeout(max(deadline - time.monotonic(), 0.01))
                connection, (peer_host, _) = listener.accept()
            except TimeoutError:
                missing = sorted(set(range(1, workers)) - control.keys())
                _refuse_all(control, _who_is_missing(missing, workers))
            hello = _read_hello(connection)
            if hello is None:
                continue  # not a worker: a port scanner, a health check
            reason = _why_refused(hello, me, control)
            if reason is not None:
                with contextlib.suppress(OSError):
                    write_line(connection, {"refused": reason})
                _refuse_all(control, reason)
            # Worker 0 may have begun later than this one: it says until when it waits,
            # so that the other is still there to be told who was missing.
            with contextlib.suppress(OSError):
                remaining = max(deadline - time.monotonic(), 0.0)
                write_line(connection, {"wait_seconds": remaining})
            control[hello["rank"]] = connection
            if present is not None:
                present.add(hello["rank"])
            addresses[hello["rank"]] = (peer_host, hello["port"])
    for peer, connection in control.items():
        # Worker 0 itself is where the others found it.
        table = [None, *(addresses[r] for r in range(1, workers))]
        write_line(connection, {"addresses": table, "port_of_0": me["port"]})
        control[peer] = tuned(connection)
    return control, [
        ("127.0.0.1", me["port"]),
        *(addresses[r] for r in sorted(addresses)),
    ]


def _read_hello(connection: socket.socket) -> dict[str, Any] | None:
    connection.settimeout(HANDSHAKE_SECONDS)
    try:
        hello = read_line(connection)
        if {"rank", "workers", "version", "port"} <= hello.keys():
            return hello
    except (OSError, ValueError):
        pass
    connection.close()
    return None


def _why_refused(
    hello: dict[str, Any], me: dict[str, Any], present: dict[int, Any]
) -> str | None:
    for key, words in (("workers", "workers"), ("version", "the tfdp version")):
        if hello[key] != me[key]:
            return (
                f"Worker {hello['rank']} says {words}={hello[key]}, worker 0 says "
                f"{me[key]}. Start all workers with the same settings and the same "
                "tfdp."
            )
    if hello["rank"] in present or not 0 < hello["rank"] < me["workers"]:
        return (
            f"Two workers say that they are worker {hello['rank']} of "
            f"{me['workers']}. Give each process a rank of its own."
        )
    return None


def _who_is_missing(missing: list[int], workers: int) -> str:
    return (
        f"Not all {workers} workers came together: {name_workers(missing)} did not "
        "arrive at worker 0 in time. See their output; check that they can reach the "
        "coordinator's address."
    )


def name_workers(ranks: list[int]) -> str:
    """ "worker 1" or "workers 1, 3"."""
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _refuse_all(control: dict[int, socket.socket], reason: str) -> None:
    for connection in control.values():
        with contextlib.suppress(OSError):
            write_line(connection, {"refused": reason})
            connection.close()
    raise CollectiveError(reason)


def _join(
    me: dict[str, Any], coordinator: tuple[str, int], deadline: float
) -> tuple[dict[int, socket.socket], list[tuple[str, int]]]:
    where = f"{coordinator[0]}:{coordinator[1]}"
    try:
        connection = connect(coordinator, deadline)
    except OSError as error:
        raise CollectiveError(
            f"Worker {me['rank']} found no worker 0 at {where}: {error}. Start worker "
            "0, and check the address and the firewall."
        ) from error
    try:
        remaining = max(deadline - time.monotonic(), 0.0)
        connection.settimeout(remaining + HANDSHAKE_SECONDS)
        write_line(connection, me)
        answer = read_line(connection)
        if "wait_seconds" in answer:
            connection.settimeout(answer["wait_seconds"] + HANDSHAKE_SECONDS)
            answer = read_line(connection)
    except (OSError, ValueError) as error:
        connection.close()
        raise CollectiveError(
            f"Worker {me['rank']} reached {where}, but worker 0 did not answer in "
            "time: not all workers came, or another program listens there."
        ) from error
    if "refused" in answer:
        connection.close()
        raise CollectiveError(answer["refused"])
    table = answer["addresses"]
    table[0] = (connection.getpeername()[0], answer["port_of_0"])
    return {0: connection}, [(host, port) for host, port in table]


def _form_rings(
    rank: int,
    addresses: list[tuple[str, int]],
    channels: int,
    listener: socket.socket,
    deadline: float,
) -> list[tuple[socket.socket, socket.socket]]:
    workers = len(addresses)
    after, before = (rank + 1) % workers, (rank - 1) % workers
    to_next: list[socket.socket] = []
    from_before: dict[int, socket.socket] = {}
    try:
        for channel in range(channels):
            connection = connect(addresses[after], deadline)
            write_line(connection, {"rank": rank, "channel": channel})
            to_next.append(connection)
        while len(from_before) < channels:
            listener.settimeout(max(deadline - time.monotonic(), 0.01))
            connection, _ = listener.accept()
            connection.settimeout(HANDSHAKE_SECONDS)
            hello = read_line(connection)
            if hello.get("rank") == before:
                from_before[hello["channel"]] = tuned(connection)
    except (OSError, ValueError) as error:
        raise CollectiveError(
            f"Worker {rank} could not connect with its neighbours, workers {before} "
            f"and {after} at {addresses[after][0]}:{addresses[after][1]}: {error}. "
            "Workers must reach each other directly; check firewalls between them."
        ) from error
    return [(to_next[channel], from_before[channel]) for channel in range(channels)]
