"""How the benchmark tells processes when it is their turn: lines of JSON, both ways.

The connection is a Unix socket, because mpiexec passes standard input to rank 0 only.
Its end is the end of the process: no worker outlives the benchmark, wherever it waits.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
from typing import Any

__all__ = ["Control"]

EXIT_CODE = 75


class Control:
    """A worker's end of the connection.

    Args:
      path: of the benchmark's socket.
      rank: of this worker, which it says first.
    """

    def __init__(self, path: str, rank: int):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        self._stream = connection.makefile("rw", encoding="utf-8")
        self._orders: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._is_over = False
        self.say({"rank": rank})
        threading.Thread(target=self._listen, daemon=True).start()

    def say(self, message: dict[str, Any]) -> None:
        """Sends one line."""
        self._stream.write(json.dumps(message) + "\n")
        self._stream.flush()

    def next_turn(self) -> int:
        """Waits for the number of calls to time; 0 when there is no more to do."""
        return self._orders.get()

    def _listen(self) -> None:
        try:
            for line in self._stream:
                self._orders.put(json.loads(line)["calls"])
        finally:
            # A thread that hangs in a collective cannot be ended otherwise.
            os._exit(EXIT_CODE)
