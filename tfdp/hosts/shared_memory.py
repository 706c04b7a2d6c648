"""Sender and receiver between processes of one machine, through shared memory.

Short data goes through the connection, after its length. Long data is copied into the
next slot of the shared memory; the connection carries only its size, which wakes the
receiver, and returns how many slots were read. The kernel would copy long data twice.
Deadlines, deaths and the order of bytes remain those of the connection.
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

# The memory is anonymous (`memfd_create`), so no kill leaves a file behind. The
# receiver opens it as /proc/PROCESS/fd/DESCRIPTOR of the sender; random bytes at its
# start prove that it is the right memory.
try:
    import fcntl

    # Neither end may shrink the memory: the other's next access would kill it.
    SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    memfd_create = os.memfd_create
    CAN_SHARE = True
except (ImportError, AttributeError):  # not Linux
    CAN_SHARE = False


# Small enough for the cache between the two processes, large enough for the cost of two
# system calls and a wakeup. Sums of 102 MB took 29 to 35 ms with 256 KiB, 24 to 27 with
# 512 KiB, 22 to 27 with 1 MiB, which made sums of 2 and 4 MB no faster.
SLOT_BYTES = 1 << 19
SLOTS = 8
PROOF_BYTES = 32
# One page, so that slots start at a page.
HEAD_BYTES = mmap.PAGESIZE
SIZE_BYTES = HEAD_BYTES + SLOTS * SLOT_BYTES
NAME = "tfdp-places"
MOST_NUMBER = 1 << 31  # of a process or descriptor


class Slots:
    """SLOTS slots of SLOT_BYTES each in `memory`, which two processes share."""

    def __init__(self, memory: mmap.mmap):
        whole = np.frombuffer(memory, np.uint8)
        self._proof = whole[:PROOF_BYTES]
        self._slots = whole[HEAD_BYTES:].reshape(SLOTS, SLOT_BYTES)

    def __getitem__(self, turn: int) -> np.ndarray:
        return self._slots[turn % SLOTS]

    @property
    def proof(self) -> bytes:
        return self._proof.tobytes()


class OwnSlots:
    """Memory that the sender creates and offers until the receiver has opened it."""

    def __init__(self) -> None:
        if not CAN_SHARE:
            raise OSError("no anonymous memory on this system")
        self._descriptor = memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, SIZE_BYTES)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)
            memory = mmap.mmap(self._descriptor, SIZE_BYTES)
        except BaseException:
            os.close(self._descriptor)
            raise
        memory[:PROOF_BYTES] = secrets.token_bytes(PROOF_BYTES)
        self.slots = Slots(memory)

    @property
    def offer(self) -> dict[str, Any]:
        return {
            "process": os.getpid(),
            "descriptor": self._descriptor,
            "proof": self.slots.proof.hex(),
        }

    def close(self) -> None:
        os.close(self._descriptor)


def open_slots(offer: Mapping[str, Any]) -> Slots:
    """Opens memory that another process offers; raises OSError or ValueError."""
    process = checked_integer(offer.get("process"), 1, MOST_NUMBER)
    descriptor = checked_integer(offer.get("descriptor"), 0, MOST_NUMBER)
    proof = bytes.fromhex(checked_text(offer.get("proof"), 2 * PROOF_BYTES))
    if not CAN_SHARE:
        raise OSError("no anonymous memory on this system")
    path = f"/proc/{process}/fd/{descriptor}"
    # In another PID namespace these numbers name another file: opening a pipe or device
    # could block or have an effect.
    if not os.readlink(path).startswith(f"/memfd:{NAME}"):
        raise ValueError("the descriptor is not such memory")
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    with contextlib.closing(os.fdopen(opened, "r+b", buffering=0)):
        sealed = fcntl.fcntl(opened, fcntl.F_GET_SEALS) & SEALS == SEALS
        if not sealed or os.fstat(opened).st_size != SIZE_BYTES:
            raise ValueError("not sealed, or of another size")
        slots = Slots(mmap.mmap(opened, SIZE_BYTES))
    if not secrets.compare_digest(slots.proof, proof):
        raise ValueError("the memory of another offer")
    return slots


# Sent before all data: the number of bytes, and whether they lie in a slot.
HEAD = struct.Struct("<I")
LIES_IN_SLOT = 1 << 31
LARGEST_SHORT_BYTES = LARGEST_DIRECT_BYTES - HEAD.size
INBOX_BYTES = 2 * LARGEST_DIRECT_BYTES
# Returned at once: returning costs a system call, and half of the slots remain.
SLOTS_BACK = SLOTS // 2
LOOK_AGAIN_SECONDS = 0.002


def _has_unsent(connection: socket.socket) -> bool:
    """Whether the other end's kernel has not received everything."""
    import termios  # exists on Linux only, as does the memory

    waiting = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
    return bool(struct.unpack("i", waiting)[0])


class SharedSender(Sender):
    """A `Sender` that moves long arrays through `slots`."""

    def __init__(self, connection: socket.socket, timeout_seconds: float, slots: Slots):
        super().__init__(connection, timeout_seconds)
        set_timeout(connection, socket.SO_RCVTIMEO, timeout_seconds)  # returned slots
        self._slots: Slots | None = slots
        self._turn = self._turns_back = 0
        self._heads = 0

    @property
    def sent_bytes(self) -> int:
        return self._taken_bytes - self._heads * HEAD.size

    def _begin(self, view: memoryview) -> None:
        if view.nbytes > LARGEST_SHORT_BYTES:
            self._put(functools.partial(self._send_by_slots, view))
        elif view.nbytes:
            self._heads += 1
            self._send_or_queue(memoryview(HEAD.pack(view.nbytes) + view))

    def _send_by_slots(self, view: memoryview) -> None:
        data = np.asarray(view)
        if self._slots is None:
            raise ConnectionAbortedError("closed here")
        for start in range(0, data.size, SLOT_BYTES):
            part = data[start : start + SLOT_BYTES]
            while self._turn - self._turns_back >= SLOTS:
                self._turns_back += self._slots_back()
            self._slots[self._turn][: part.size] = part
            self._turn += 1
            self._connection.sendall(HEAD.pack(LIES_IN_SLOT | part.size))
            self._taken_bytes += part.size

    @property
    def blocked_seconds(self) -> float:
        """0: memory is no link, and a peer that does not read is no slow link."""
        return 0.0

    def drain(self, until: float) -> None:
        """Waits until the other end's kernel has received everything.

        Returned slots lie here unread, and closing a connection with unread data resets
        it: data still to be sent would be lost.
        """
        with self._queueing:
            if self._failure is not None or self._queued != self._done:
                return
        # An error means closed or broken meanwhile: nothing left to do.
        with contextlib.suppress(OSError, ValueError):
            self._connection.shutdown(socket.SHUT_WR)
            while _has_unsent(self._connection) and time.monotonic() < until:
                time.sleep(LOOK_AGAIN_SECONDS)

    def _end(self) -> None:
        # The memory stays mapped while an array refers to it.
        self._slots = None

    def _slots_back(self) -> int:
        try:
            done = self._connection.recv(SLOTS)
        except BlockingIOError as error:
            raise TimeoutError("no slot of the shared memory became free") from error
        if not done:
            raise ConnectionError("closed")
        if sum(done) > self._turn - self._turns_back:
            raise ConnectionError("more slots returned than are in use")
        return sum(done)


class SharedReceiver(Receiver):
    """Receives from a `SharedSender`."""

    def __init__(self, connection: socket.socket, timeout_seconds: float, slots: Slots):
        super().__init__(connection, timeout_seconds)
        self._slots: Slots | None = slots
        self._turn = 0
        self._done = 0  # slots read but not returned yet
        # Bytes received through the connection but not consumed.
        self._inbox = np.empty(INBOX_BYTES, np.uint8)
        self._start = self._end = 0
        # Of the current item: bytes left, and its slot, if any.
        self._left = 0
        self._slot: np.ndarray | None = None

    def fill(self, array: np.ndarray) -> None:
        view = np.asarray(as_bytes(array))
        with self._receiving:
            while view.size:
                if not self._left:
                    self._next()
                size = min(self._left, view.size)
                if self._slot is None:
                    size = self._take_from_inbox(view[:size])
                    self._left -= size
                else:
                    view[:size] = self._slot[:size]
                    self._advance(size)
                view = view[size:]

    def add(self, array: np.ndarray, own: np.ndarray) -> None:  # type: ignore[override]
        """Fills `array` with the sum of received data and `own`."""
        with self._receiving:
            if not self._left:
                self._next()
            if self._slot is not None and self._left >= array.nbytes:
                add_up(self._slot[: array.nbytes].view(array.dtype), own, array)
                self._advance(array.nbytes)
                return
        self.fill(array)
        add_up(array, own, array)

    def close(self) -> None:
        super().close()
        with self._receiving:
            # A thread that receives now finds a closed connection. The memory stays
            # mapped while an array refers to it.
            self._start = self._end = self._left = 0
            self._slot = self._slots = None

    def _next(self) -> None:
        while self._end - self._start < HEAD.size:
            self._receive_more()
        (head,) = HEAD.unpack_from(self._inbox.data, self._start)
        self._start += HEAD.size
        size, in_slot = head & ~LIES_IN_SLOT, bool(head & LIES_IN_SLOT)
        if not 0 < size <= (SLOT_BYTES if in_slot else LARGEST_SHORT_BYTES):
            raise ConnectionError("received an invalid length")
        self._left = size
        if self._slots is None:
            raise ConnectionAbortedError("closed here")
        self._slot = self._slots[self._turn] if in_slot else None
        self._turn += in_slot

    def _take_from_inbox(self, array: np.ndarray) -> int:
        if self._start == self._end:
            self._receive_more()
        size = min(array.size, self._end - self._start)
        array[:size] = self._inbox[self._start : self._start + size]
        self._start += size
        return size

    def _receive_more(self) -> None:
        kept = self._inbox[self._start : self._end]
        # Less than one length, or nothing.
        self._inbox[: kept.size] = kept.copy()
        self._start, self._end = 0, kept.size
        self._end += self._receive_into(self._inbox[self._end :].data)

    def _advance(self, size: int) -> None:
        if self._slot is not None:
            self._slot = self._slot[size:]
        self._left -= size
        # Only now may the sender write there again.
        if not self._left:
            self._done += 1
            if self._done == SLOTS_BACK:
                # A sender that has left needs no slot.
                with contextlib.suppress(OSError):
                    self._connection.send(bytes([self._done]), socket.MSG_DONTWAIT)
                self._done = 0


# The agreement between ring neighbors: each offers memory to the worker after it, if it
# has the same address, and opens the offer of the worker before it.


class SharedMemory(NamedTuple):
    """Memory shared with the workers after (reads) and before (writes), if any."""

    after: Slots | None = None
    before: Slots | None = None


NOTHING_SHARED = SharedMemory()


class NoAnswer(Exception):
    """A neighbor (after or before this worker) closed, or gave no valid answer."""

    def __init__(self, is_after: bool, error: Exception):
        super().__init__(str(error))
        self.is_after = is_after


def share_memory(
    pairs: Sequence[tuple[socket.socket, socket.socket]], deadline: float
) -> list[SharedMemory]:
    """Agrees on memory for each pair (to the worker after, from the one before)."""
    with contextlib.ExitStack() as stack:
        with _failures_of(is_after=True):
            own = [_offer(after, stack) for after, _ in pairs]
        with _failures_of(is_after=False):
            before = [_answer(connection, deadline) for _, connection in pairs]
        with _failures_of(is_after=True):
            opened = [_is_open(after, deadline) for after, _ in pairs]
    return [
        SharedMemory(mine if is_open else None, theirs)
        for mine, is_open, theirs in zip(own, opened, before, strict=True)
    ]


@contextlib.contextmanager
def _failures_of(*, is_after: bool) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise NoAnswer(is_after, error) from error


def _is_open(connection: socket.socket, deadline: float) -> bool:
    is_open = read_line(connection, deadline).get("opened")
    if not isinstance(is_open, bool):
        raise ValueError("no answer whether the memory is open")
    return is_open


def _offer(connection: socket.socket, stack: contextlib.ExitStack) -> Slots | None:
    own = None
    if connection.getpeername()[0] == connection.getsockname()[0]:
        # Fails without such memory, or at the limit of open files.
        with contextlib.suppress(OSError):
            own = OwnSlots()
            stack.callback(own.close)  # when all answers have arrived
    write_line(connection, {} if own is None else own.offer)
    return None if own is None else own.slots


def _answer(connection: socket.socket, deadline: float) -> Slots | None:
    offer = read_line(connection, deadline)
    slots = None
    if offer:
        # Fails for another user's or namespace's process: the connection is used then.
        with contextlib.suppress(OSError, ValueError):
            slots = open_slots(offer)
    write_line(connection, {"opened": slots is not None})
    return slots
