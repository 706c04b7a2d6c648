"""Blocks with checksums: whatever damages them on their way, nobody gets to see it."""

import itertools
import json
import socket
import sys
import types

import numpy as np
import pytest

from tests.pure.test_socket_link import on_workers
from tests.support.wires import HANG_SECONDS, in_a_thread
from tests.support.workers import free_port
from tfdp.errors import CollectiveError, MissingDependencyError
from tfdp.hosts import checked_wire, link_speed, shared_memory
from tfdp.hosts.checked_wire import (
    HEAD_BYTES,
    CheckedReceiver,
    CheckedSender,
    DamagedBlockError,
)
from tfdp.hosts.elastic_group import LEFT_OUT, MET, ElasticHosts
from tfdp.hosts.elastic_transfers import Watched
from tfdp.hosts.messages import read_as
from tfdp.hosts.row_sums import RowExchange
from tfdp.hosts.socket_link import SocketLink

SIZES = [24, 1, 0, 60]


def recorded(sizes):
    """What is sent, and the bytes that go over the connection for it."""
    draw = np.random.default_rng(3)
    sent = [draw.bytes(size) for size in sizes]
    here, there = socket.socketpair()
    with there:
        sender = CheckedSender(here, timeout_seconds=30)
        for data in sent:
            sender.send(data)
        done = in_a_thread(sender.flush)
        size = sum(sizes) + HEAD_BYTES * np.count_nonzero(sizes)
        stream = there.recv(size, socket.MSG_WAITALL)
        done.result(HANG_SECONDS)
        sender.close()
    return sent, stream


def received(stream, sizes):
    """What a receiver hands out of `stream`, whose end is the end of the connection;
    and the error that it raises."""
    here, there = socket.socketpair()
    with here, there:
        here.sendall(stream)
        here.shutdown(socket.SHUT_WR)
        receiver, came = CheckedReceiver(there, timeout_seconds=30), []
        try:
            for size in sizes:
                came.append(bytes(receiver.take(size)))
        except (DamagedBlockError, ConnectionError) as error:
            return came, type(error)
    return came, None


def test_every_bit_that_is_changed_is_found():
    sent, stream = recorded(SIZES)
    assert received(stream, SIZES) == (sent, None)
    for bit in range(8 * len(stream)):
        damaged = bytearray(stream)
        damaged[bit // 8] ^= 1 << bit % 8
        came, error = received(damaged, SIZES)
        # Also in a length: who believed it would wait for what never comes.
        assert error is DamagedBlockError, bit
        assert came == sent[: len(came)]


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_damaged_nothing_of_it_is_handed_out(seed):
    sent, stream = recorded(SIZES)
    draw = np.random.default_rng(seed)
    first, last = sorted(draw.integers(0, len(stream) + 1, 2))
    # Lost, twice, of another length, or noise.
    inside = [b"", stream[first:last] * 2, draw.bytes(draw.integers(1, 40))][seed % 3]
    damaged = stream[:first] + inside + stream[last:]
    came, error = received(damaged, SIZES)
    assert came == sent[: len(came)]
    assert error is not None or came == sent


class Flipping:
    """A connection that changes one bit of the numbers that it sends next."""

    def __init__(self, connection):
        self._connection = connection
        self.is_armed = False

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def __enter__(self):
        return self._connection.__enter__()

    def __exit__(self, *error):
        return self._connection.__exit__(*error)

    def _flipped(self, data):
        # Behind the head of the block and that of the exchange.
        if self.is_armed and len(data) > 100:
            self.is_armed = False
            data = bytearray(data)
            data[83] ^= 0x40  # of an exponent
        return data

    def send(self, data, *flags):
        return self._connection.send(self._flipped(data), *flags)

    def sendall(self, data, *flags):
        return self._connection.sendall(self._flipped(data), *flags)

    def sendmsg(self, parts):
        return self._connection.sendmsg([self._flipped(part) for part in parts])


@pytest.mark.parametrize(
    "way, distance, size", [("ring", 1, 200_000), ("gather", 2, 300), ("ring", 1, 300)]
)
def test_a_changed_bit_ends_the_exchange_and_names_both_ends(
    monkeypatch, way, distance, size
):
    """Without checksums other numbers are the sums, and no error says so."""
    monkeypatch.setattr(shared_memory, "CAN_SHARE", False)
    arrays = [np.random.default_rng(rank).normal(size=size) for rank in range(3)]

    def work(link):
        link.take_way(way)
        before = link.sum([arrays[link.rank]], "before")[0]
        assert np.array_equal(before, link.sum([arrays[link.rank]], "again")[0])
        link.gather(b"", "all are here")
        if link.rank == 1:
            sender = link._channels["step"].neighbours[distance - 1].sender
            sender._connection = Flipping(sender._connection)
            sender._connection.is_armed = True
        return [link.sum([arrays[link.rank]], "gradients")[0] for _ in range(2)]

    errors = on_workers(3, work, checksum=True, timeout_seconds=30)
    assert all(isinstance(error, CollectiveError) for error in errors), errors
    words = (
        f"worker {(1 + distance) % 3} received from worker 1 in exchange 3 (gradients"
    )
    assert all(words in str(error) for error in errors), errors


@pytest.mark.parametrize("workers", [2, 3])
def test_sums_with_and_without_checksums_have_the_same_bits(monkeypatch, workers):
    monkeypatch.setattr(shared_memory, "CAN_SHARE", False)
    arrays = np.random.default_rng(5).normal(size=(workers, 150_001))

    def work(link):
        # Otherwise the measured speed of the link decides, and with it the bytes.
        before, sums = link.sent_bytes(), []
        for way, n in (("doubling", 5), ("doubling", 900), ("ring", 150_001)):
            link.take_way(way)
            sums += link.sum([arrays[link.rank, :n]], "sum")
        blobs = link.gather(b"x" * 100_000 * link.rank, "blobs")
        sent = link.sent_bytes() - before
        link.gather(b"", "the end")
        return [one.tobytes() for one in sums], blobs, sent

    with_checksums = on_workers(workers, work, checksum=True)
    assert with_checksums == on_workers(workers, work, checksum=False)


def test_workers_with_and_without_checksums_do_not_meet():
    address = f"127.0.0.1:{free_port()}"
    meetings = [
        in_a_thread(SocketLink, rank, 2, address, 30.0, 15.0, b"", rank == 0)
        for rank in range(2)
    ]
    for meeting in meetings:
        with pytest.raises(CollectiveError, match="Communication.checksum=False"):
            meeting.result(HANG_SECONDS)


@pytest.mark.parametrize(
    "package",
    [None, types.SimpleNamespace(implementation="python", value=lambda data: 0)],
    ids=["missing", "slow"],
)
def test_without_its_package_nothing_is_sent_unchecked(monkeypatch, package):
    monkeypatch.setitem(sys.modules, "google_crc32c", package)
    checked_wire.crc32c.cache_clear()
    try:
        with pytest.raises(MissingDependencyError, match="google-crc32c"):
            SocketLink(0, 2, f"127.0.0.1:{free_port()}", 30.0, checksum=True)
    finally:
        checked_wire.crc32c.cache_clear()


def test_checksums_are_crc32c():
    """The check value of the algorithm, for other programs to agree on."""
    assert checked_wire.checksum_of(b"123456789") == 0xE3069283


def test_weights_of_hosts_that_come_and_go_have_checksums():
    weights = np.random.default_rng(3).normal(size=1000)
    for flip in (None, 5):
        here, there = socket.socketpair()
        sender, receiver = (Watched(end, lambda: None) for end in (here, there))
        if flip:
            sender._connection = Flipping(here)
            sender._connection.is_armed = True
        sender.send(weights)
        came = np.zeros_like(weights)
        if flip:
            with pytest.raises(ConnectionError, match="is damaged"):
                receiver.fill([came])
        else:
            receiver.fill([came])
            assert np.array_equal(came, weights)
        sender.close()
        receiver.close()


@pytest.mark.parametrize(
    "read, data",
    [
        (lambda blob: np.frombuffer(blob, "<f8"), b"12345"),
        (lambda blob: bytes(blob).decode(), b"\xff\xfe"),
        (checked_wire.SIZES.unpack, b"123"),
        (checked_wire.SIZES.unpack_from, b""),
        (lambda blob: json.loads(blob)["port"], b"[]"),
        (json.loads, b"[" * 100_000),
    ],
)
def test_what_cannot_be_read_names_its_worker(read, data):
    with pytest.raises(CollectiveError, match="Worker 7 sent no table, but .* bytes"):
        read_as(read, data, 7, "table")


@pytest.mark.parametrize("which, outcomes", [(1, [MET, MET]), (2, [MET, LEFT_OUT])])
def test_hosts_that_come_and_go_throw_damaged_weights_away(
    monkeypatch, which, outcomes
):
    """What is sent: the state of worker 0, what worker 1 brings, and the means."""
    address, size, sends = f"127.0.0.1:{free_port()}", 1000, itertools.count()
    send = Watched._send

    def flipping(wire, view):
        if view.nbytes == 8 * size and next(sends) == which:
            view = memoryview(bytes([view[0] ^ 1]) + view[1:])
        send(wire, view)

    monkeypatch.setattr(Watched, "_send", flipping)

    def run(rank):
        hosts = ElasticHosts(
            rank, 2, address, timeout_seconds=60, silence_seconds=5, secret=b"key"
        )
        hosts.exchange_state([np.zeros(size)])
        (weights,), outcome = hosts.meet(4, [np.full(size, float(rank))])
        return hosts, weights, outcome

    runs = [in_a_thread(run, rank) for rank in range(2)]
    done = [each.result(HANG_SECONDS) for each in runs]
    assert [outcome for _, _, outcome in done] == outcomes
    # What worker 1 has brought is in the mean; left out, it keeps its own.
    means = [0.5, 1.0 if LEFT_OUT in outcomes else 0.5]
    for (hosts, weights, _), mean in zip(done, means, strict=True):
        np.testing.assert_array_equal(weights, mean)
        hosts.close()


def test_a_speed_that_is_none_names_its_worker(monkeypatch):
    def gathered(blob, *_):
        return [memoryview(blob), memoryview(blob)[:-1]]

    monkeypatch.setattr(link_speed, "gather_blobs", gathered)
    with pytest.raises(CollectiveError, match="Worker 1 sent no speed, but 15 bytes"):
        on_workers(2, lambda link: None)


class Short:
    """A link over which the other worker sends less than a head."""

    workers = 2

    def gather_memory(self, memory, label):
        return [memory.data, memory.data[:7]]


def test_rows_without_a_head_are_not_taken_for_a_whole_table():
    exchange = RowExchange((9, 4), "rows", None, True)
    with pytest.raises(CollectiveError, match="Worker 1 sent no number of rows"):
        exchange(Short(), np.ones((1, 4), np.float32), np.array([5]))
