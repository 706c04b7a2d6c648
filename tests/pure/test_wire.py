"""Both ends of a connection of a ring, closed at every moment.

Over a connection alone, with checksums, and with memory that both ends share.
"""

import functools
import socket
import threading
import time

import numpy as np
import pytest

from tests.support.wires import HANG_SECONDS, in_a_thread, shared_slots
from tfdp.hosts.checked_wire import CheckedReceiver, CheckedSender
from tfdp.hosts.shared_memory import (
    CAN_SHARE,
    SLOT_BYTES,
    SharedReceiver,
    SharedSender,
)
from tfdp.hosts.wire import LARGEST_DIRECT_BYTES, Receiver, Sender


@pytest.fixture
def pair():
    here, there = socket.socketpair()
    with here, there:
        yield here, there


@pytest.fixture(params=["connection", "checksums", "memory"])
def ends(request):
    """What makes each of the two ends."""
    if request.param == "connection":
        return Sender, Receiver
    if request.param == "checksums":
        return CheckedSender, CheckedReceiver
    if not CAN_SHARE:
        pytest.skip("memory without a name is Linux' own")
    mine, theirs = shared_slots()
    return (
        functools.partial(SharedSender, slots=mine),
        functools.partial(SharedReceiver, slots=theirs),
    )


def test_a_flush_after_the_end_is_an_error(pair, ends):
    """`close()` may come between the last receive of an exchange and its flush."""
    sender = ends[0](pair[0], timeout_seconds=30)
    sender.send(b"all of it")
    sender.flush()
    sender.close()
    with pytest.raises(ConnectionAbortedError):
        in_a_thread(sender.flush).result(HANG_SECONDS)
    with pytest.raises(ConnectionAbortedError):
        sender.send(b"more")


def test_a_flush_ends_when_the_sender_is_closed(pair, ends):
    sender = ends[0](pair[0], timeout_seconds=300)
    # More than any buffer of the kernel holds, and nobody reads it.
    sender.send(np.zeros(1 << 26, np.uint8))
    flush = in_a_thread(sender.flush)
    assert pair[1].recv(1)  # it is under way
    sender.close()
    with pytest.raises(OSError):
        flush.result(HANG_SECONDS)


def test_the_threads_of_closed_senders_end(pair, ends):
    sender = ends[0](pair[0], timeout_seconds=300)
    sender.send(np.zeros(1 << 26, np.uint8))  # long: a thread sends it
    sender.close()
    sender.close()
    sender._thread.join(HANG_SECONDS)
    assert not sender._thread.is_alive()
    assert pair[0].fileno() == -1
    assert pair[1].recv(1) == b""


def test_a_receiver_that_is_closed_ends_its_wait(pair, ends):
    receiver = ends[1](pair[0], timeout_seconds=300)
    taken = in_a_thread(receiver.take, 2)
    pair[1].sendall(b"1")
    in_a_thread(receiver.close).result(HANG_SECONDS)
    with pytest.raises(OSError):
        taken.result(HANG_SECONDS)
    with pytest.raises(OSError):
        receiver.take(1)


def test_what_is_no_memory_is_refused_where_it_is_sent(pair, ends):
    """Not in the thread, which would end and leave the next flush waiting."""
    sender = ends[0](pair[0], timeout_seconds=30)
    with pytest.raises((TypeError, AttributeError)):
        sender.send("text")
    sender.flush()
    sender.close()


def test_what_is_short_is_sent_without_a_thread(pair, ends):
    sender = ends[0](pair[0], timeout_seconds=30)
    for number in range(100):
        sender.send(bytes([number]) * 24)
        sender.flush()
    assert sender._thread is None
    assert sender.sent_bytes == 2400
    receiver = ends[1](pair[1], timeout_seconds=30)
    assert receiver.take(2400) == b"".join(bytes([n]) * 24 for n in range(100))
    sender.close()
    assert pair[0].fileno() == -1


@pytest.mark.parametrize("seed", range(3))
def test_short_and_long_ones_come_in_order(pair, ends, seed):
    """Also when the kernel takes a part of a short one, and while a thread sends."""
    draw = np.random.default_rng(seed)
    sizes = draw.choice([0, 1, 24, LARGEST_DIRECT_BYTES, 3_000_000], 60)
    sent = [draw.bytes(size) for size in sizes]
    sender = ends[0](pair[0], timeout_seconds=30)

    def send_all():
        for data in sent:
            sender.send(data)
        sender.flush()
        return sender.sent_bytes

    done = in_a_thread(send_all)
    whole = ends[1](pair[1], timeout_seconds=30).take(int(sizes.sum()))
    assert whole == b"".join(sent)
    assert done.result(HANG_SECONDS) == sizes.sum()
    sender.close()


def test_short_ones_wait_for_nobody(pair, ends):
    """Who sends must not wait for who receives: both may be sending."""
    sender = ends[0](pair[0], timeout_seconds=30)
    pieces = [bytes([n % 256]) * LARGEST_DIRECT_BYTES for n in range(200)]
    for piece in pieces:  # far more than the kernel takes, and nobody reads
        sender.send(piece)
    assert sender._thread is not None
    receiver = ends[1](pair[1], timeout_seconds=30)
    assert receiver.take(200 * LARGEST_DIRECT_BYTES) == b"".join(pieces)
    sender.flush()
    sender.close()


def test_a_send_over_a_broken_connection_is_an_error(pair, ends):
    sender = ends[0](pair[0], timeout_seconds=30)
    pair[1].close()
    with pytest.raises(OSError):
        for _ in range(2):
            sender.send(b"x")
    with pytest.raises(OSError):
        sender.flush()
    sender.close()


@pytest.mark.parametrize("seed", range(5))
def test_sizes_that_are_asked_for_need_not_be_those_that_were_sent(pair, ends, seed):
    draw = np.random.default_rng(seed)
    sizes = draw.choice([1, 7, LARGEST_DIRECT_BYTES, SLOT_BYTES, SLOT_BYTES + 1], 40)
    data = np.frombuffer(draw.bytes(int(sizes.sum())), np.uint8)
    sender, receiver = ends[0](pair[0], 30), ends[1](pair[1], 30)

    def send_all():
        for part in np.split(data, np.cumsum(sizes)[:-1]):
            sender.send(part)
        sender.flush()

    done = in_a_thread(send_all)
    came = np.empty_like(data)
    edges = np.sort(draw.integers(0, data.size, 60))
    for part in np.split(came, edges):
        receiver.fill(part)
    assert np.array_equal(came, data)
    done.result(HANG_SECONDS)
    sender.close()


WITHHELD_SECONDS = 0.2


@pytest.mark.parametrize("ends", ["connection", "checksums"], indirect=True)
def test_a_send_that_blocks_and_a_block_that_is_under_way_are_timed(pair, ends):
    sender, block = ends[0](pair[0], 30), np.ones(1 << 23, np.uint8)
    assert sender.blocked_seconds == 0.0
    sender.send(b"short")
    sender.flush()
    assert sender.blocked_seconds == 0.0
    sender.send(block)  # more than any buffer of the kernel holds
    received = np.empty_like(block)
    receiver = ends[1](pair[1], 30)
    receiver.fill(np.empty(5, np.uint8))
    pair[1].recv(1, socket.MSG_PEEK)  # the block: its send has begun
    time.sleep(WITHHELD_SECONDS)
    receiver.fill(received)
    sender.flush()
    assert sender.blocked_seconds >= WITHHELD_SECONDS
    # A wait for the first bytes is none of the link, and the rest was there.
    arriving = receiver.arriving_seconds
    assert arriving < sender.blocked_seconds - WITHHELD_SECONDS / 2


def test_a_block_that_comes_bit_by_bit_is_under_way(pair):
    has_begun = threading.Event()

    class Begun(Receiver):
        def _receive_into(self, view, flags=0):
            got = super()._receive_into(view, flags)
            has_begun.set()
            return got

    receiver, block = Begun(pair[1], 30), np.ones(1 << 16, np.uint8)
    filled = in_a_thread(receiver.fill, np.empty_like(block))
    time.sleep(WITHHELD_SECONDS)  # before it begins
    began = time.monotonic()
    pair[0].sendall(block[:1000])
    assert has_begun.wait(HANG_SECONDS)
    time.sleep(WITHHELD_SECONDS)
    pair[0].sendall(block[1000:])
    filled.result(HANG_SECONDS)
    passed = time.monotonic() - began
    # A busy machine may begin to count late.
    assert WITHHELD_SECONDS / 2 <= receiver.arriving_seconds <= passed
