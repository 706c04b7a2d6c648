"""Both ends of a connection of a ring, closed at every moment."""

import concurrent.futures
import socket
import threading

import numpy as np
import pytest

from tfdp.hosts.wire import Receiver, Sender

# Only there to end a hang.
HANG_SECONDS = 60


@pytest.fixture
def pair():
    here, there = socket.socketpair()
    with here, there:
        yield here, there


@pytest.fixture
def in_a_thread():
    """Runs something that may hang, in a thread that the test does not wait for."""

    def run(function, *arguments):
        done = concurrent.futures.Future()

        def work():
            try:
                done.set_result(function(*arguments))
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return done

    return run


def test_a_flush_after_the_end_is_an_error(pair, in_a_thread):
    """`close()` may come between the last receive of an exchange and its flush."""
    sender = Sender(pair[0], timeout_seconds=30)
    sender.send(b"all of it")
    sender.flush()
    sender.close()
    with pytest.raises(ConnectionAbortedError):
        in_a_thread(sender.flush).result(HANG_SECONDS)
    with pytest.raises(ConnectionAbortedError):
        sender.send(b"more")


def test_a_flush_ends_when_the_sender_is_closed(pair, in_a_thread):
    sender = Sender(pair[0], timeout_seconds=300)
    # More than any buffer of the kernel holds, and nobody reads it.
    sender.send(np.zeros(1 << 26, np.uint8))
    flush = in_a_thread(sender.flush)
    assert pair[1].recv(1)  # it is under way
    sender.close()
    with pytest.raises(OSError):
        flush.result(HANG_SECONDS)


def test_the_threads_of_closed_senders_end(pair):
    sender = Sender(pair[0], timeout_seconds=300)
    sender.send(np.zeros(1 << 26, np.uint8))  # long: a thread sends it
    sender.close()
    sender.close()
    sender._thread.join(HANG_SECONDS)
    assert not sender._thread.is_alive()
    assert pair[0].fileno() == -1
    assert pair[1].recv(1) == b""


def test_a_receiver_that_is_closed_ends_its_wait(pair, in_a_thread):
    receiver = Receiver(pair[0], timeout_seconds=300)
    taken = in_a_thread(receiver.take, 2)
    pair[1].sendall(b"1")
    in_a_thread(receiver.close).result(HANG_SECONDS)
    with pytest.raises(OSError):
        taken.result(HANG_SECONDS)
    with pytest.raises(OSError):
        receiver.take(1)


def test_what_is_no_memory_is_refused_where_it_is_sent(pair):
    """Not in the thread, which would end and leave the next flush waiting."""
    sender = Sender(pair[0], timeout_seconds=30)
    with pytest.raises((TypeError, AttributeError)):
        sender.send("text")
    sender.flush()
    sender.close()
