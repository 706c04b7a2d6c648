"""Both ends of a connection between processes of one machine, which share memory.

    what is short   goes through the connection, behind its length
    what is long    is copied into the next place of the shared memory; through the
                    connection goes only that it lies there, which wakes the receiver
    back            how many places the receiver is done with

The kernel would copy what is long twice, and take memory and packets for it; so it is
copied once. Deadlines, deaths and the order of all bytes stay what a connection's are.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdp.hosts.messages import checked_integer, checked_text
from tfdp.hosts.ring import add_up
from tfdp.hosts.wire import (
    LARGEST_DIRECT_BYTES,
    Receiver,
    Sender,
    as_bytes,
    read_line,
    set_timeout,
    write_line,
)

# Memory that two processes of one machine share, in places that are used in turn.
#
# The memory has no name in any file system (`memfd_create`): who has it open keeps it,
# and nothing is left of it after any kill. The process that receives opens it by way of
# the one that sends, /proc/PROCESS/fd/DESCRIPTOR; that this is the memory that was
# meant is shown by random bytes at its beginning.


try:
    import fcntl

    # No end may cut the memory off: the other one's next access would kill it.
    SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    memfd_create = os.memfd_create
except (ImportError, AttributeError):  # not Linux
    CAN_SHARE = False
else:
    CAN_SHARE = True


# Small enough to stay in the cache between the two processes, and no smaller: each one
# costs two calls of the kernel, and mostly a thread that wakes up. Sums of 102 MB took
# 29 to 35 ms with 256 KiB, 24 to 27 with 512 KiB and 22 to 27 with 1 MiB; with that one
# sums of 2 and 4 MB were not faster.
PLACE_BYTES = 1 << 19
PLACES = 8
PROOF_BYTES = 32
# The first page, so that the places begin at one.
HEAD_BYTES = mmap.PAGESIZE
SIZE_BYTES = HEAD_BYTES + PLACES * PLACE_BYTES
NAME = "tfdp-places"
MOST_PROCESS = 1 << 31
MOST_DESCRIPTOR = 1 << 31


class Places:
    """PLACES places of PLACE_BYTES each.

    Args:
      memory: SIZE_BYTES that two processes share.
    """

    def __init__(self, memory: mmap.mmap):
        whole = np.frombuffer(memory, np.uint8)
        self._proof = whole[:PROOF_BYTES]
        self._places = whole[HEAD_BYTES:].reshape(PLACES, PLACE_BYTES)

    def __getitem__(self, turn: int) -> np.ndarray:
        """uint8 of [PLACE_BYTES]: the place of that turn."""
        return self._places[turn % PLACES]

    @property
    def proof(self) -> bytes:
        """The random bytes that only these have."""
        return self._proof.tobytes()


class OwnPlaces:
    """What the sending process makes, and offers until the other one has opened it.

    Raises:
      OSError: the system has no such memory.
    """

    def __init__(self) -> None:
        if not CAN_SHARE:
            raise OSError("no memory without a name on this system")
        self._descriptor = memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, SIZE_BYTES)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)
            memory = mmap.mmap(self._descriptor, SIZE_BYTES)
        except BaseException:
            os.close(self._descriptor)
            raise
        memory[:PROOF_BYTES] = secrets.token_bytes(PROOF_BYTES)
        self.places = Places(memory)

    @property
    def offer(self) -> dict[str, Any]:
        """What `open_places` needs to know."""
        return {
            "process": os.getpid(),
            "descriptor": self._descriptor,
            "proof": self.places.proof.hex(),
        }

    def close(self) -> None:
        """Lets go of the descriptor; the memory stays."""
        os.close(self._descriptor)


def open_places(offer: Mapping[str, Any]) -> Places:
    """The places that another process of this machine offers.

    Raises:
      OSError: they cannot be opened from here.
      ValueError: it is no offer, or what lies there is something else.
    """
    process = checked_integer(offer.get("process"), 1, MOST_PROCESS)
    descriptor = checked_integer(offer.get("descriptor"), 0, MOST_DESCRIPTOR)
    proof = bytes.fromhex(checked_text(offer.get("proof"), 2 * PROOF_BYTES))
    if not CAN_SHARE:
        raise OSError("no memory without a name on this system")
    path = f"/proc/{process}/fd/{descriptor}"
    # In another namespace the numbers mean another process' file: to open a pipe or a
    # device could wait, or do something.
    if not os.readlink(path).startswith(f"/memfd:{NAME}"):
        raise ValueError("the descriptor is that of something else")
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    with contextlib.closing(os.fdopen(opened, "r+b", buffering=0)):
        sealed = fcntl.fcntl(opened, fcntl.F_GET_SEALS) & SEALS == SEALS
        if not sealed or os.fstat(opened).st_size != SIZE_BYTES:
            raise ValueError("not sealed, or of another size")
        places = Places(mmap.mmap(opened, SIZE_BYTES))
    if not secrets.compare_digest(places.proof, proof):
        raise ValueError("the memory of another offer")
    return places


# Before everything that is sent: how many bytes come, and whether they lie in a place.
HEAD = struct.Struct("<I")
LIES_IN_PLACE = 1 << 31
LARGEST_SHORT_BYTES = LARGEST_DIRECT_BYTES - HEAD.size
INBOX_BYTES = 2 * LARGEST_DIRECT_BYTES
# Told back at once: it takes a call of the kernel, and half of them are still there.
PLACES_BACK = PLACES // 2
LOOK_AGAIN_SECONDS = 0.002


def _has_unsent(connection: socket.socket) -> bool:
    """Whether something is not with the other end's kernel yet."""
    import fcntl  # these two are Linux' own, as is the memory
    import termios

    waiting = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
    return bool(struct.unpack("i", waiting)[0])


class SharedSender(Sender):
    """A `Sender` of which long arrays go through `places`."""

    def __init__(
        self, connection: socket.socket, timeout_seconds: float, places: Places
    ):
        super().__init__(connection, timeout_seconds)
        # For what comes back.
        set_timeout(connection, socket.SO_RCVTIMEO, timeout_seconds)
        self._places: Places | None = places
        self._turn = self._turns_back = 0
        self._heads = 0

    @property
    def sent_bytes(self) -> int:
        """What is with the kernel or in a place so far, without lengths."""
        return self._taken_bytes - self._heads * HEAD.size

    def _begin(self, view: memoryview) -> None:
        if view.nbytes > LARGEST_SHORT_BYTES:
            self._put(functools.partial(self._send_by_places, view))
        elif view.nbytes:
            self._heads += 1
            self._send_or_queue(memoryview(HEAD.pack(view.nbytes) + view))

    def _send_by_places(self, view: memoryview) -> None:
        data = np.asarray(view)
        if self._places is None:
            raise ConnectionAbortedError("closed here")
        for start in range(0, data.size, PLACE_BYTES):
            part = data[start : start + PLACE_BYTES]
            while self._turn - self._turns_back >= PLACES:
                self._turns_back += self._places_back()
            self._places[self._turn][: part.size] = part
            self._turn += 1
            self._connection.sendall(HEAD.pack(LIES_IN_PLACE | part.size))
            self._taken_bytes += part.size

    def see_off(self, until: float) -> None:
        """See `Sender.see_off`: until the other process' kernel has all.

        Places that came back lie here unread, and a connection that is closed with
        something unread in it is reset: what it still has to send is thrown away.
        """
        with self._queueing:
            if self._failure is not None or self._queued != self._done:
                return
        # Closed meanwhile, or broken: then nothing can be done for it.
        with contextlib.suppress(OSError, ValueError):
            self._connection.shutdown(socket.SHUT_WR)
            while _has_unsent(self._connection) and time.monotonic() < until:
                time.sleep(LOOK_AGAIN_SECONDS)

    def _end(self) -> None:
        # The memory stays as long as anything looks at it.
        self._places = None

    def _places_back(self) -> int:
        try:
            done = self._connection.recv(PLACES)
        except BlockingIOError as error:
            raise TimeoutError("no place in the shared memory came free") from error
        if not done:
            raise ConnectionError("closed")
        if sum(done) > self._turn - self._turns_back:
            raise ConnectionError("more places came back than there are")
        return sum(done)


class SharedReceiver(Receiver):
    """A `Receiver` of what a `SharedSender` sends."""

    def __init__(
        self, connection: socket.socket, timeout_seconds: float, places: Places
    ):
        super().__init__(connection, timeout_seconds)
        self._places: Places | None = places
        self._turn = 0
        self._done = 0  # places, of which the sender has not been told yet
        # What came through the connection, and was not asked for yet.
        self._inbox = np.empty(INBOX_BYTES, np.uint8)
        self._start = self._end = 0
        # Of what comes now: the rest, and the place where it lies.
        self._left = 0
        self._place: np.ndarray | None = None

    def fill(self, array: np.ndarray) -> None:
        """See `Receiver.fill`."""
        view = np.asarray(as_bytes(array))
        with self._receiving:
            while view.size:
                if not self._left:
                    self._next()
                size = min(self._left, view.size)
                if self._place is None:
                    size = self._take_from_inbox(view[:size])
                    self._left -= size
                else:
                    view[:size] = self._place[:size]
                    self._advance(size)
                view = view[size:]

    def add(self, array: np.ndarray, own: np.ndarray) -> None:  # type: ignore[override]
        """Fills `array` with the sum of what comes and `own`, of the same size."""
        with self._receiving:
            if not self._left:
                self._next()
            if self._place is not None and self._left >= array.nbytes:
                came = self._place[: array.nbytes].view(array.dtype)
                add_up(came, own, array)
                self._advance(array.nbytes)
                return
        self.fill(array)
        add_up(array, own, array)

    def close(self) -> None:
        """See `Receiver.close`."""
        super().close()
        with self._receiving:
            # As if nothing had come: who receives now meets a closed connection. The
            # memory stays as long as anything looks at it.
            self._start = self._end = self._left = 0
            self._place = self._places = None

    def _next(self) -> None:
        """Learns what comes next."""
        while self._end - self._start < HEAD.size:
            self._receive_more()
        (head,) = HEAD.unpack_from(self._inbox.data, self._start)
        self._start += HEAD.size
        size, in_place = head & ~LIES_IN_PLACE, bool(head & LIES_IN_PLACE)
        if not 0 < size <= (PLACE_BYTES if in_place else LARGEST_SHORT_BYTES):
            raise ConnectionError("what came is no length")
        self._left = size
        if self._places is None:
            raise ConnectionAbortedError("closed here")
        self._place = self._places[self._turn] if in_place else None
        self._turn += in_place

    def _take_from_inbox(self, array: np.ndarray) -> int:
        if self._start == self._end:
            self._receive_more()
        size = min(array.size, self._end - self._start)
        array[:size] = self._inbox[self._start : self._start + size]
        self._start += size
        return size

    def _receive_more(self) -> None:
        kept = self._inbox[self._start : self._end]
        # Less than a length is ever kept, or nothing.
        self._inbox[: kept.size] = kept.copy()
        self._start, self._end = 0, kept.size
        self._end += self._receive_into(self._inbox[self._end :].data)

    def _advance(self, size: int) -> None:
        if self._place is not None:
            self._place = self._place[size:]
        self._left -= size
        # Only now may the sender write there again.
        if not self._left:
            self._give_back()

    def _give_back(self) -> None:
        self._done += 1
        if self._done == PLACES_BACK:
            # Who has left needs no place.
            with contextlib.suppress(OSError):
                self._connection.send(bytes([self._done]), socket.MSG_DONTWAIT)
            self._done = 0


# Neighbours in the ring that run on one machine agree on memory that they share.
#
# each    offers memory to the worker after it, if that is at this machine's address
# each    opens what the worker before offers, and says whether it could


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
