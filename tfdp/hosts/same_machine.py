"""Neighbours in the ring that run on one machine agree on memory that they share.

each    offers memory to the worker after it, if that is at this machine's address
each    opens what the worker before offers, and says whether it could
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import NamedTuple

from tfdp.hosts.shared_places import OwnPlaces, Places, open_places
from tfdp.hosts.wire import read_line, write_line

__all__ = ["NOTHING_SHARED", "SharedMemory", "share_memory"]


class SharedMemory(NamedTuple):
    """What a pair of connections shares; None where the network is between them.

    Args:
      after: with the worker after this one, which reads it.
      before: with the worker before, which writes it.
    """

    after: Places | None = None
    before: Places | None = None


NOTHING_SHARED = SharedMemory()


def share_memory(
    pairs: Sequence[tuple[socket.socket, socket.socket]], deadline: float
) -> list[SharedMemory]:
    """Agrees with the workers after and before this one, for each pair of connections.

    Args:
      pairs: to the worker after, from the worker before.
      deadline: for all of it (`time.monotonic`).

    Raises:
      TimeoutError: when they do not answer by then.
      ConnectionError: when one has closed.
      ValueError: when what comes is no answer.

    Cost: two lines to each side, of which nobody waits for but the last one.
    """
    with contextlib.ExitStack() as stack:
        own = [_offer(after, stack) for after, _ in pairs]
        before = [_answer(connection, deadline) for _, connection in pairs]
        shared = []
        for (after, _), mine, theirs in zip(pairs, own, before, strict=True):
            is_open = read_line(after, deadline).get("opened")
            if not isinstance(is_open, bool):
                raise ValueError("not told whether the memory is open")
            shared.append(SharedMemory(mine if is_open else None, theirs))
    return shared


def _offer(connection: socket.socket, stack: contextlib.ExitStack) -> Places | None:
    own = None
    if connection.getpeername()[0] == connection.getsockname()[0]:
        # A system without such memory, or a process that may open no more files.
        with contextlib.suppress(OSError):
            own = OwnPlaces()
            stack.callback(own.close)  # when the answers are here
    write_line(connection, {} if own is None else own.offer)
    return None if own is None else own.places


def _answer(connection: socket.socket, deadline: float) -> Places | None:
    offer = read_line(connection, deadline)
    places = None
    if offer:
        # Of another user, or of another namespace: then the connection has to do.
        with contextlib.suppress(OSError, ValueError):
            places = open_places(offer)
    write_line(connection, {"opened": places is not None})
    return places
