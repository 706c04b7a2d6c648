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
import socket
import struct
import time

import numpy as np

from tfdp.hosts.ring import add_up
from tfdp.hosts.shared_places import PLACE_BYTES, PLACES, Places
from tfdp.hosts.wire import (
    LARGEST_DIRECT_BYTES,
    Receiver,
    Sender,
    as_bytes,
    set_timeout,
)

__all__ = ["SharedReceiver", "SharedSender"]

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
