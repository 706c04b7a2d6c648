"""Nothing is allocated by a length that another worker only announced."""

import concurrent.futures
import contextlib
import socket
import struct
import tracemalloc

import numpy as np
import pytest

from tests.pure.test_socket_link import on_workers
from tfdp.errors import CollectiveError
from tfdp.hosts.recursive_doubling import MOST_AT_ONCE_BYTES
from tfdp.hosts.wire import LARGEST_TAKE_BYTES, Receiver

HUGE_BYTES = 2**60


@pytest.mark.parametrize("workers", [2, 3])
def test_who_brings_more_than_was_agreed_is_named_by_all(workers):
    def work(link):
        return link.gather(b"x" * (3 + 2 * link.rank), "names", most_bytes=4)

    for error in on_workers(workers, work):
        assert isinstance(error, CollectiveError)
    # Worker 1 is the first one that brings more; who it does not reach hears of it.
    assert "Worker 1 brings 5 bytes to a gather" in str(on_workers(2, work)[1])


def test_an_announced_length_is_refused_before_anything_is_allocated():
    def work(link):
        if link.rank == 0:
            return link.gather(b"", "names")
        # What no worker does, with the right key and the right header.
        with link._exchange("gather", (), "names", "host", limit=2**31 - 1) as ring:
            ring.sender.send(struct.pack("<Q", HUGE_BYTES))
            ring.sender.flush()
            ring.receiver.take(8)
            ring.receiver.take(1)  # until worker 0 has given up
        return None

    error, other = on_workers(2, work)
    assert isinstance(error, CollectiveError) and isinstance(other, CollectiveError)
    assert f"Worker 1 brings {HUGE_BYTES} bytes" in str(error)


def test_workers_that_agreed_on_other_bounds_are_out_of_step():
    def work(link):
        return link.gather(b"", "names", most_bytes=8 + link.rank)

    for error in on_workers(2, work):
        assert isinstance(error, CollectiveError)
        assert "out of step" in str(error)
        assert "gather of at most 8 bytes each (names)" in str(error)
        assert "gather of at most 9 bytes each (names)" in str(error)


def test_memory_is_taken_as_bytes_come():
    here, there = socket.socketpair()
    receiver = Receiver(here, timeout_seconds=5.0)
    there.sendall(b"x" * 1000)
    there.close()
    tracemalloc.start()
    try:
        with contextlib.suppress(ConnectionError):
            receiver.take(2**31 - 1)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        receiver.close()
    # One part that was being filled; whatever else Python makes is far smaller.
    assert peak_bytes < 2 * LARGEST_TAKE_BYTES


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_long_and_short_blobs_reach_everybody(workers):
    # Short ones are joined; long ones are not; and what is far more than a worker's
    # own is taken as it comes.
    sizes = [[0, 3, 70_000, 3 * MOST_AT_ONCE_BYTES, 5][rank] for rank in range(workers)]

    def work(link):
        sent = [
            bytes([rank, 7, rank ^ 1]) * (size // 3) for rank, size in enumerate(sizes)
        ]
        for _ in range(2):  # the second time in memory that is used again
            own = np.frombuffer(bytearray(sent[link.rank]), np.uint8)
            assert [bytes(each) for each in link.gather_memory(own, "rows")] == sent
            assert link.gather(sent[link.rank], "rows") == sent
        return [type(each) for each in link.gather(sent[link.rank], "rows")]

    assert on_workers(workers, work) == [[bytes] * workers] * workers


def test_long_blobs_come_whole():
    here, there = socket.socketpair()
    receiver = Receiver(here, timeout_seconds=5.0)
    sent = bytes(range(256)) * (3 * LARGEST_TAKE_BYTES // 256) + b"end"
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(there.sendall, sent)
        assert receiver.take(len(sent)) == sent
    receiver.close()
    there.close()
