"""Sockets: JSON lines for control messages, whole buffers for arrays."""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdp.hosts.messages import parse_object

SOCKET_BUFFER_BYTES = 4 << 20
LONGEST_LINE_BYTES = 1 << 20
# Memory grows by this much as data arrives; an announced size is not trusted.
LARGEST_TAKE_BYTES = 1 << 20
# Up to this size the caller's thread sends: waking the sender thread takes longer.
LARGEST_DIRECT_BYTES = 1 << 16
# Shorter blocks are not timed: they arrive whole.
LEAST_TIMED_BYTES = 1 << 15

# An action for the sender thread, or an event that it sets on reaching it.
Queued = Callable[[], None] | threading.Event


def tuned(connection: socket.socket) -> socket.socket:
    """Turns off delays of small messages; makes room for large ones."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    return connection


def has_ended(connection: socket.socket) -> bool:
    """Whether the peer has closed `connection`; data that waits counts as open."""
    timeout_seconds = connection.gettimeout()
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        with contextlib.suppress(OSError):
            connection.settimeout(timeout_seconds)


def write_line(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends one JSON object as a line; `read_line` reads it."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def read_line(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """Reads one line byte by byte, so that nothing behind it is consumed.

    Raises TimeoutError past `deadline` (`time.monotonic`), ConnectionError if the peer
    has closed, ValueError for a line that is not JSON, or too long.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        line += receive_exactly(connection, 1, deadline)
        if len(line) > LONGEST_LINE_BYTES:
            raise ValueError("line too long")
    return parse_object(line)


def receive_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    """The next `size` bytes (few); TimeoutError past `deadline` (`time.monotonic`)."""
    data = b""
    while len(data) < size:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(remaining)
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("closed")
        data += part
    return data


def set_timeout(connection: socket.socket, option: int, seconds: float) -> None:
    """Sets a timeout in the kernel, so that one call can move a whole buffer."""
    # Python's own timeout would make the socket non-blocking: each call would then
    # move what fits in the kernel's buffer and poll in between.
    connection.settimeout(None)
    whole = int(seconds)
    value = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, option, value)


class Sender:
    """Sends arrays in order without waiting for the receiver.

    The caller's thread sends short data. Long data, and data that the kernel does not
    take at once, go through a sender thread, which starts when first needed.
    """

    def __init__(self, connection: socket.socket, timeout_seconds: float):
        self._connection = connection
        self._queue: queue.SimpleQueue[Queued | None] = queue.SimpleQueue()
        self._failure: OSError | None = None
        # Guards the queue: nothing may be queued after the thread's end marker.
        self._queueing = threading.Lock()
        self._is_closed = False
        # Counts of items queued and of items that the thread has finished.
        self._queued = self._done = 0
        self._taken_bytes = 0
        self._blocked_seconds = 0.0
        set_timeout(connection, socket.SO_SNDTIMEO, timeout_seconds)
        self._thread: threading.Thread | None = None

    @property
    def sent_bytes(self) -> int:
        return self._taken_bytes

    @property
    def blocked_seconds(self) -> float:
        """How long the sender thread has sent: the kernel's buffers were full."""
        return self._blocked_seconds

    def send(self, data: np.ndarray | bytes | memoryview) -> None:
        """Sends or queues `data`, which must not change until it is sent."""
        view = as_bytes(data)
        with self._queueing:
            if self._failure is not None:
                raise self._failure
            self._begin(view)

    def flush(self) -> None:
        """Waits until the kernel has all data; OSError if that cannot happen."""
        with self._queueing:
            if self._failure is not None:
                raise self._failure
            if self._queued == self._done:
                return
            done = threading.Event()
            self._put(done)
        done.wait()
        if self._failure is not None:
            raise self._failure

    def drain(self, until: float) -> None:
        """Waits, before `close`, until `until` for data that `close` would discard."""

    def close(self) -> None:
        with self._queueing:
            if self._is_closed:
                return
            self._is_closed = True
            self._failure = self._failure or ConnectionAbortedError("closed here")
            # Not `close`: it would not wake a thread that is inside `sendall`.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            if self._thread is None:
                self._connection.close()  # sending needs the lock
                self._end()
            else:
                self._queue.put(None)

    def _end(self) -> None:
        """Handles the end of sending: no more data will follow; here nothing."""

    def _begin(self, view: memoryview) -> None:
        self._send_or_queue(view)

    def _send_or_queue(self, view: memoryview) -> None:
        """Sends what the kernel takes at once, and queues the rest."""
        if self._queued == self._done and view.nbytes <= LARGEST_DIRECT_BYTES:
            view = view[self._send_now(view) :]
        if view.nbytes:
            self._put(functools.partial(self._send_all, view))

    def _send_now(self, view: memoryview) -> int:
        if not view.nbytes:
            return 0
        try:
            taken = self._connection.send(view, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._failure = error
            raise
        self._taken_bytes += taken
        return taken

    def _send_all(self, view: memoryview) -> None:
        self._connection.sendall(view)
        self._taken_bytes += len(view)

    def _put(self, item: Queued) -> None:
        if self._thread is None:
            name = "tfdp-sender"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        self._queued += 1
        self._queue.put(item)

    def _run(self) -> None:
        # This thread also closes the connection: if another thread closed it, its
        # descriptor number could already belong to another file.
        with self._connection:
            while (item := self._queue.get()) is not None:
                if not isinstance(item, threading.Event) and self._failure is None:
                    began = time.monotonic()
                    try:
                        item()
                    except OSError as error:
                        self._failure = self._failure or error
                    self._blocked_seconds += time.monotonic() - began
                self._done += 1
                # Also after a failure: `flush` then raises it.
                if isinstance(item, threading.Event):
                    item.set()
        self._end()


class Receiver:
    """Receives arrays in order.

    `add`, where set, adds received data without copying it first; see `ring.Ends`.
    """

    add: Callable[[np.ndarray, np.ndarray], None] | None = None

    def __init__(self, connection: socket.socket, timeout_seconds: float):
        self._connection = connection
        self._receiving = threading.Lock()
        #: From the first bytes of blocks to their last, so far.
        self.arriving_seconds = 0.0
        set_timeout(connection, socket.SO_RCVTIMEO, timeout_seconds)

    def fill(self, array: np.ndarray) -> None:
        """Fills `array`, or raises TimeoutError, ConnectionError (closed), OSError."""
        with self._receiving:
            self._receive_whole(as_bytes(array))

    def _receive_whole(self, view: memoryview) -> None:
        began = None
        if view.nbytes >= LEAST_TIMED_BYTES:
            # Until its first bytes came, the sender may not have begun.
            view = view[self._receive_into(view) :]
            began = time.monotonic()
        while view.nbytes:
            view = view[self._receive_into(view, socket.MSG_WAITALL) :]
        if began is not None:
            self.arriving_seconds += time.monotonic() - began

    def _receive_into(self, view: memoryview, flags: int = 0) -> int:
        try:
            got = self._connection.recv_into(view, 0, flags)
        except BlockingIOError as error:
            raise TimeoutError("nothing came") from error
        if got == 0:
            raise ConnectionError("closed")
        return got

    def take(self, size_bytes: int) -> bytearray:
        """The next `size_bytes` bytes; memory is allocated as they arrive."""
        data = bytearray()
        while missing := size_bytes - len(data):
            part = np.empty(min(missing, LARGEST_TAKE_BYTES), np.uint8)
            self.fill(part)
            data += part.data
        return data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with self._receiving:  # see `Sender._run`
            self._connection.close()


def as_bytes(data: np.ndarray | bytes | memoryview) -> memoryview:
    """The memory of `data` as bytes (bfloat16 does not export a buffer)."""
    if not isinstance(data, (np.ndarray, np.generic)):  # TensorFlow passes numbers
        return memoryview(data)
    return np.reshape(data, -1).view(np.uint8).data
