"""Workers on threads, whose connections at distances 1, 2, 4 ... are queues."""

import queue
import threading

import numpy as np

from tfdp.hosts.wire import as_bytes
from tfdp.plan.sum_ways import distances

HANG_SECONDS = 20


class MeshEnd:
    """The two connections of one worker at one distance; counts what it sends."""

    def __init__(self, to_after, from_before):
        self._to_after, self._from_before = to_after, from_before
        self._came = bytearray()
        self.messages = self.sent_bytes = 0

    def send(self, data):
        copied = bytes(as_bytes(data))
        self.messages += 1
        self.sent_bytes += len(copied)
        if copied:
            self._to_after.put(copied)

    def take(self, size_bytes):
        while len(self._came) < size_bytes:
            self._came += self._from_before.get(timeout=HANG_SECONDS)
        taken, self._came = self._came[:size_bytes], self._came[size_bytes:]
        return taken

    def fill(self, array):
        view = as_bytes(array)
        view[:] = self.take(view.nbytes)


def on_mesh(workers, work):
    """Results of `work(rank, ends)` on each worker, and its ends."""
    places = [(rank, d) for rank in range(workers) for d in distances(workers)]
    into = {place: queue.Queue() for place in places}
    ends = [
        [
            MeshEnd(into[(rank + d) % workers, d], into[rank, d])
            for d in distances(workers)
        ]
        for rank in range(workers)
    ]
    results = [None] * workers

    def run(rank):
        results[rank] = work(rank, ends[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()
    # Nothing is left behind for the next exchange to read.
    assert all(each.empty() for each in into.values())
    return results, ends


def bits(arrays):
    return [np.asarray(array).tobytes() for array in arrays]
