"""Sockets: whole lines of JSON for agreements, whole buffers for arrays."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
import time
from typing import Any

import numpy as np

from tfdp.errors import CollectiveError

__all__ = [
    "Receiver",
    "Sender",
    "connect",
    "listen",
    "read_line",
    "write_line",
]

SOCKET_BUFFER_BYTES = 4 << 20
RETRY_SECONDS = 0.05
LONGEST_LINE_BYTES = 1 << 20


def free_port() -> int:
    """A port of this machine that nobody listens on, for whoever binds it soon."""
    with listen("", 0) as listener:
        return int(listener.getsockname()[1])


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one.

    Raises:
      CollectiveError: when the address is taken or not of this machine.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise CollectiveError(
            f"Cannot listen on {host or '*'}:{port}: {error.strerror}. Another program "
            "may use the port: choose another coordinator port."
        ) from error
    listener.listen(128)
    return listener


def connect(address: tuple[str, int], deadline: float) -> socket.socket:
    """A connection to `address`, tried again until `deadline` (`time.monotonic`).

    Raises:
      OSError: the last reason, when nobody listened there in time.
    """
    while True:
        try:
            remaining = max(deadline - time.monotonic(), RETRY_SECONDS)
            connection = socket.create_connection(address, timeout=min(remaining, 5.0))
            if connection.getsockname() == connection.getpeername():
                # On a free local port Linux can connect a socket to itself.
                connection.close()
                raise ConnectionRefusedError(111, "Connection refused")
            return tuned(connection)
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(RETRY_SECONDS)


def tuned(connection: socket.socket) -> socket.socket:
    """`connection` without delays for small messages, with room for large ones."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    return connection


def write_line(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends one JSON object as a line."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def read_line(connection: socket.socket) -> dict[str, Any]:
    """Reads one line, byte by byte so that nothing of what follows is taken.

    Raises:
      ConnectionError: when the other side has closed.
      ValueError: when what comes is not a line of JSON.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise ConnectionError("closed")
        line += byte
        if len(line) > LONGEST_LINE_BYTES:
            raise ValueError("line too long")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message


def set_timeout(connection: socket.socket, option: int, seconds: float) -> None:
    """A timeout that the kernel keeps, so that one call can move a whole buffer."""
    connection.settimeout(None)
    whole = int(seconds)
    value = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, option, value)


class Sender:
    """Sends arrays in order from a thread of its own, so that sending can wait."""

    def __init__(self, connection: socket.socket, timeout_seconds: float):
        self._connection = connection
        self._queue: queue.SimpleQueue[memoryview | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self._failure: OSError | None = None
        # Nothing is queued behind the end of the thread: nobody would ever take it.
        self._queueing = threading.Lock()
        self._is_closed = False
        #: What the kernel has taken so far.
        self.sent_bytes = 0
        set_timeout(connection, socket.SO_SNDTIMEO, timeout_seconds)
        self._thread = threading.Thread(
            target=self._run, name="tfdp-sender", daemon=True
        )
        self._thread.start()

    def send(self, data: np.ndarray | bytes) -> None:
        """Queues `data`, which must stay as it is until it is sent.

        Raises:
          OSError: when an earlier send has failed, or this end was closed.
        """
        self._put(as_bytes(data))

    def flush(self) -> None:
        """Waits until everything is with the kernel.

        Raises:
          OSError: when it never will be.
        """
        done = threading.Event()
        self._put(done)
        done.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Ends the thread and the connection, sent or not."""
        with self._queueing:
            if self._is_closed:
                return
            self._is_closed = True
            self._failure = self._failure or ConnectionAbortedError("closed here")
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._queue.put(None)

    def _put(self, item: memoryview | threading.Event) -> None:
        with self._queueing:
            if self._failure is not None:
                raise self._failure
            self._queue.put(item)

    def _run(self) -> None:
        # The thread that sends is the one that closes: the number of a descriptor that
        # another one closed could meanwhile be that of another file.
        with self._connection:
            while (item := self._queue.get()) is not None:
                if isinstance(item, threading.Event):
                    item.set()
                elif self._failure is None:
                    try:
                        self._connection.sendall(item)
                        self.sent_bytes += len(item)
                    except OSError as error:
                        self._failure = self._failure or error


class Receiver:
    """Receives arrays in order."""

    def __init__(self, connection: socket.socket, timeout_seconds: float):
        self._connection = connection
        self._receiving = threading.Lock()
        set_timeout(connection, socket.SO_RCVTIMEO, timeout_seconds)

    def fill(self, array: np.ndarray) -> None:
        """Fills `array` with what comes.

        Raises:
          TimeoutError: when nothing came for the timeout.
          ConnectionError: when the other side has closed.
          OSError: when this end was closed.
        """
        view = as_bytes(array)
        with self._receiving:
            while view.nbytes:
                try:
                    got = self._connection.recv_into(view, 0, socket.MSG_WAITALL)
                except BlockingIOError as error:
                    raise TimeoutError("nothing came") from error
                if got == 0:
                    raise ConnectionError("closed")
                view = view[got:]

    def take(self, size_bytes: int) -> bytearray:
        """The next `size_bytes` bytes."""
        data = np.empty(size_bytes, np.uint8)
        self.fill(data)
        return bytearray(data)

    def close(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with self._receiving:  # see Sender; whoever receives has been woken
            self._connection.close()


def as_bytes(data: np.ndarray | bytes) -> memoryview:
    """The memory of `data`, whatever its type (bfloat16 has no buffer of its own)."""
    if isinstance(data, bytes):
        return memoryview(data)
    return data.reshape(-1).view(np.uint8).data
