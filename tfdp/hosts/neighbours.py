"""Each worker's connections to those 1, 2, 4 ... places after it and before it.

    p workers, c channels:   2 c ceil(log2 p) connections of each worker, half of them
                             dialed by it

A sum of many workers needs a round for each distance; in a ring, which is the distance
1 alone, it would need one for each worker.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import socket
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from tfdp.cluster.description import join_address
from tfdp.errors import CollectiveError
from tfdp.hosts.dial import dial
from tfdp.hosts.door import Door
from tfdp.hosts.messages import checked_integer
from tfdp.hosts.wire import has_ended
from tfdp.hosts.worker_names import name_workers
from tfdp.plan.sum_ways import distances

__all__ = ["Address", "Pair", "connect_neighbours"]

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

    door = Door([listener], secret, "ring", parse)
    with concurrent.futures.ThreadPoolExecutor(1) as dialing, door:
        dialed = dialing.submit(
            _dial_all, rank, addresses, places, after, secret, deadline, given_up
        )
        try:
            _receive_all(door, places, before, deadline)
            door.close()
            dialed.result()
        except BaseException as error:
            given_up.set()
            concurrent.futures.wait([dialed])
            _close_all([*after.values(), *before.values()])
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


def _receive_all(
    door: Door[Place],
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


def _close_all(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()
