"""Neighbours in the ring that run on one machine agree on memory that they share.

each    offers memory to the worker after it, if that is at this machine's address
each    opens what the worker before offers, and says whether it could
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tfdp.hosts.shared_places import OwnPlaces, Places, open_places
from tfdp.hosts.wire import read_line, write_line

__all__ = ["NOTHING_SHARED", "NoAnswer", "SharedMemory", "share_memory"]


class SharedMemory(NamedTuple):
    """What a pair of connections shares; None where the network is between them.

    Args:
      after: with the worker after this one, which reads it.
      before: with the worker before, which writes it.
    """

    after: Places | None = None
    before: Places | None = None


NOTHING_SHARED = SharedMemory()


class NoAnswer(Exception):
    """A neighbour closed, did not answer in time, or said what is no answer.

    Args:
      is_after: whether it is the worker after this one; else the one before.
      error: how that showed.
    """

    def __init__(self, is_after: bool, error: Exception):
        super().__init__(str(error))
        self.is_after = is_after


def share_memory(
    pairs: Sequence[tuple[socket.socket, socket.socket]], deadline: float
) -> list[SharedMemory]:
    """Agrees with the workers after and before this one, for each pair of connections.

    Args:
      pairs: to the worker after, from the worker before.
      deadline: for all of it (`time.monotonic`).

    Raises:
      NoAnswer: which of them has closed, or did not answer by then.

    Cost: two lines to each side, of which nobody waits for but the last one.
    """
    with contextlib.ExitStack() as stack:
        with _asking(is_after=True):
            own = [_offer(after, stack) for after, _ in pairs]
        with _asking(is_after=False):
            before = [_answer(connection, deadline) for _, connection in pairs]
        with _asking(is_after=True):
            opened = [_is_open(after, deadline) for after, _ in pairs]
    return [
        SharedMemory(mine if is_open else None, theirs)
        for mine, is_open, theirs in zip(own, opened, before, strict=True)
    ]


@contextlib.contextmanager
def _asking(*, is_after: bool) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise NoAnswer(is_after, error) from error


def _is_open(connection: socket.socket, deadline: float) -> bool:
    """Whether the worker after this one has the memory that it was offered."""
    is_open = read_line(connection, deadline).get("opened")
    if not isinstance(is_open, bool):
        raise ValueError("not told whether the memory is open")
    return is_open


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
