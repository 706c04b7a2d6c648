"""One process of a group: `python -m benchmarks.bench.processes.member ORDERS`, JSON.

It sets up its arm, reports that it is ready, and then times calls each time that the
benchmark sends their number. The orders are the same for every process of a group:

    request, arm   what to time
    place          see `Place`; all but the rank
    cores          by rank, the core to pin a process to; empty: not pinned
    control_path   the benchmark's socket
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
from typing import Any

from benchmarks.bench.processes.arms import GROUP_ARMS, GroupArm, Place, Work
from benchmarks.bench.request import Request
from tfdp.cluster import find_cluster
from tfdp.errors import ConfigurationError
from tfdp.tools.measuring.in_turn import time_in_turn

# Control connection: lines of JSON both ways, over a Unix socket because mpiexec passes
# standard input to rank 0 only. When it closes the process ends, wherever it waits: no
# worker outlives the benchmark.
EXIT_CODE = 75


class Control:
    """A worker's end of the connection; first it sends its rank."""

    def __init__(self, path: str, rank: int):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        self._stream = connection.makefile("rw", encoding="utf-8")
        self._turns: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.send({"rank": rank})
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        self._stream.write(json.dumps(message) + "\n")
        self._stream.flush()

    def next_turn(self) -> int:
        """Waits for the number of calls to time; 0: finished."""
        return self._turns.get()

    def _listen(self) -> None:
        try:
            for line in self._stream:
                self._turns.put(json.loads(line)["calls"])
        finally:
            # A thread that hangs in a collective cannot be ended otherwise.
            os._exit(EXIT_CODE)


def main(arguments: list[str]) -> None:
    """Entry point of the process; `arguments`: the orders, as JSON."""
    # TensorFlow's start-up log would bury a worker's own error.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    orders = json.loads(arguments[0])
    request, arm = Request.from_json(orders["request"]), orders["arm"]
    cluster = find_cluster()
    place = Place(**orders["place"], rank=cluster.rank if cluster else 0)
    # Before TensorFlow starts its threads, which inherit the affinity.
    if orders["cores"]:
        os.sched_setaffinity(0, {orders["cores"][place.rank]})
    control = Control(orders["control_path"], place.rank)
    call, facts = _prepare(request, arm, GROUP_ARMS[arm], place)
    control.send(facts)
    while calls := control.next_turn():
        seconds = time_in_turn({arm: call}, repeats=1, calls=calls)
        control.send({"seconds": seconds[arm][0]})


def _prepare(request: Request, arm: str, row: GroupArm, place: Place) -> Work:
    if row.prepare is not None:
        return row.prepare(request, arm, place)
    if row.make_strategy is None:
        raise ConfigurationError(f"The arm {arm!r} has neither `prepare` nor strategy.")
    start_tensorflow(request)
    strategy = row.make_strategy(place)
    from benchmarks.bench.processes.work import prepare_reduction, prepare_training

    is_reduction = request.case.suite == "allreduce"
    prepare = prepare_reduction if is_reduction else prepare_training
    return prepare(request, arm, strategy, place)


def start_tensorflow(request: Request) -> None:
    """Sets threads and devices, before anything else uses TensorFlow."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(request.intra_op_threads)
    tf.config.set_visible_devices([], "GPU")


if __name__ == "__main__":
    main(sys.argv[1:])
