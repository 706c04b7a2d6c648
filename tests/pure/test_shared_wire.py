"""Memory that two processes of one machine share: agreed on, sent by, and abused."""

import concurrent.futures
import contextlib
import os
import socket
import time

import numpy as np
import pytest

from tests.support.open_files import open_files
from tests.support.wires import HANG_SECONDS, in_a_thread, over_loopback, shared_slots
from tfdp.hosts.ring import add_up
from tfdp.hosts.shared_memory import (
    CAN_SHARE,
    HEAD,
    LIES_IN_SLOT,
    SEALS,
    SIZE_BYTES,
    SLOT_BYTES,
    SLOTS,
    NoAnswer,
    OwnSlots,
    SharedReceiver,
    SharedSender,
    open_slots,
    share_memory,
)
from tfdp.hosts.wire import LARGEST_DIRECT_BYTES

pytestmark = pytest.mark.skipif(
    not CAN_SHARE, reason="memory without a name is Linux' own"
)


def soon():
    return time.monotonic() + HANG_SECONDS


@pytest.fixture
def pair():
    here, there = socket.socketpair()
    with here, there:
        yield here, there


@pytest.fixture
def slots():
    return shared_slots()


def test_what_lies_in_the_places_outlives_who_sent_it(slots):
    """As at the end of a job: the last sum is with the others, and the sender leaves.

    Over TCP: what the receiver tells back then meets a closed connection.
    """
    here, there = over_loopback()
    sender = SharedSender(here, 30, slots[0])
    receiver = SharedReceiver(there, 30, slots[1])
    data = np.random.default_rng(0).bytes((2 * SLOTS - 1) * SLOT_BYTES)
    sender.send(data)
    came = [receiver.take(SLOTS * SLOT_BYTES)]
    sender.flush()  # half of the slots came back, and nobody reads that
    sender.close()
    sender._thread.join(HANG_SECONDS)
    came.append(receiver.take((SLOTS - 1) * SLOT_BYTES))
    assert b"".join(came) == data
    with pytest.raises(OSError):
        receiver.take(1)
    receiver.close()


def test_what_is_short_reaches_who_reads_it_late(slots):
    """Also with slots that came back, and that the sender never read.

    A connection that is closed so is reset, and what it still has to send is lost.
    """
    with socket.socket() as door:
        # Little room where it arrives, so that most of it waits where it is sent.
        door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        door.bind(("127.0.0.1", 0))
        door.listen()
        here = socket.create_connection(door.getsockname())
        there, _ = door.accept()
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    sender = SharedSender(here, 30, slots[0])
    receiver = SharedReceiver(there, 30, slots[1])
    long = np.random.default_rng(0).bytes(SLOTS // 2 * SLOT_BYTES)
    sender.send(long)
    assert receiver.take(len(long)) == long
    short = [bytes([number]) * 60_000 for number in range(20)]
    for each in short:
        sender.send(each)
    sender.flush()

    def end():
        sender.drain(soon())
        sender.close()

    ended = in_a_thread(end)
    with contextlib.suppress(TimeoutError):
        ended.result(0.2)  # as if it did not wait
    assert receiver.take(20 * 60_000) == b"".join(short)
    ended.result(HANG_SECONDS)
    receiver.close()


def test_nobody_is_seen_off_for_ever(pair, slots):
    sender = SharedSender(pair[0], 30, slots[0])
    sender.send(b"never read")
    sender.drain(time.monotonic() + 0.05)
    sender.close()
    sender.drain(soon())


@pytest.mark.parametrize("is_long", [False, True])
def test_who_closes_lets_go_of_the_memory(pair, is_long):
    before = open_files()
    slots = shared_slots()
    assert any("/memfd:" in what for _, what, _ in open_files() - before)
    sender = SharedSender(pair[0], 30, slots[0])
    receiver = SharedReceiver(pair[1], 30, slots[1])
    del slots
    if is_long:
        sender.send(bytes(3 * SLOT_BYTES))
        receiver.take(3 * SLOT_BYTES - 1)  # in the middle of a place
    sender.close()
    receiver.close()
    if sender._thread is not None:
        sender._thread.join(HANG_SECONDS)
    assert not any("/memfd:" in what for _, what, _ in open_files() - before)
    with pytest.raises(OSError):
        receiver.take(1)
    with pytest.raises(OSError):
        sender.send(bytes(2 * SLOT_BYTES))
    sender.close()


def test_a_sender_waits_for_a_place_until_its_deadline(pair, slots):
    sender = SharedSender(pair[0], 0.3, slots[0])
    sender.send(bytes(SLOTS * SLOT_BYTES))
    sender.flush()
    sender.send(bytes(SLOT_BYTES))
    with pytest.raises(TimeoutError, match="no slot"):
        in_a_thread(sender.flush).result(HANG_SECONDS)
    sender.close()


@pytest.mark.parametrize("seed", range(5))
def test_what_is_added_where_it_lies_is_the_sum(pair, slots, seed):
    """Also of what came in part, through the connection, or in two slots."""
    draw = np.random.default_rng(seed)
    sizes = draw.choice([1, 5, 1000, SLOT_BYTES // 4, SLOT_BYTES // 2], 40)
    data = draw.normal(size=int(sizes.sum())).astype(np.float32)
    own = draw.normal(size=data.size).astype(np.float32)
    data[:2] = own[:2] = np.finfo(np.float32).max  # too large: silently infinite
    sender = SharedSender(pair[0], 30, slots[0])
    receiver = SharedReceiver(pair[1], 30, slots[1])

    def send_all():
        for part in np.split(data, np.cumsum(sizes)[:-1]):
            sender.send(part)
        sender.flush()

    done = in_a_thread(send_all)
    came = np.full_like(data, 7)
    edges = np.cumsum(draw.permutation(sizes))[:-1]
    for turn, (part, mine) in enumerate(
        zip(np.split(came, edges), np.split(own, edges), strict=True)
    ):
        if turn % 5 == 4:
            receiver.fill(part)
            add_up(part, mine, part)
        else:
            receiver.add(part, mine)
    done.result(HANG_SECONDS)
    expected = np.empty_like(data)
    add_up(data, own, expected)
    assert came.tobytes() == expected.tobytes()
    sender.close()


@pytest.mark.parametrize(
    "head",
    [
        0,
        LIES_IN_SLOT,
        LIES_IN_SLOT | (SLOT_BYTES + 1),
        LARGEST_DIRECT_BYTES,
        1 << 30,
    ],
)
def test_a_length_that_cannot_be_is_an_error(pair, slots, head):
    receiver = SharedReceiver(pair[1], 30, slots[1])
    pair[0].sendall(HEAD.pack(head))
    with pytest.raises(ConnectionError, match="an invalid length"):
        receiver.take(1)


@pytest.mark.parametrize("back", [b"\x09", b"\xff" * 8, b"\x04\x04\x04"])
def test_places_that_were_not_sent_do_not_come_back(pair, slots, back):
    sender = SharedSender(pair[0], 30, slots[0])
    pair[1].sendall(back)
    sender.send(bytes((SLOTS + 1) * SLOT_BYTES))
    with pytest.raises(ConnectionError, match="more slots"):
        in_a_thread(sender.flush).result(HANG_SECONDS)
    sender.close()


@pytest.mark.parametrize("sent_bytes", [0, 1, 3, LARGEST_DIRECT_BYTES, SLOT_BYTES + 5])
def test_what_is_sent_is_counted_without_lengths(pair, slots, sent_bytes):
    sender = SharedSender(pair[0], 30, slots[0])
    for _ in range(3):
        sender.send(bytes(sent_bytes))
    sender.flush()
    assert sender.sent_bytes == 3 * sent_bytes
    sender.close()


def changed(offer, **changes):
    return {**offer, **changes}


@pytest.mark.parametrize(
    "change",
    [
        {"process": 0},
        {"process": True},
        {"process": "1"},
        {"process": 1 << 40},
        {"process": 999_999_999},
        {"descriptor": -1},
        {"descriptor": 999_999},
        {"descriptor": None},
        {"proof": "00" * 32},
        {"proof": ""},
        {"proof": "no number"},
        {"proof": "00" * 33},
        {"proof": 5},
    ],
)
def test_an_offer_that_is_none_opens_nothing(slots, change):
    own = OwnSlots()
    with contextlib.closing(own), pytest.raises((OSError, ValueError)):
        open_slots(changed(own.offer, **change))


def test_nothing_but_such_memory_is_opened(slots):
    """A pipe would be waited for; memory that can shrink would kill its reader."""
    own = OwnSlots()
    reads, writes = os.pipe()
    plain = os.memfd_create("tfdp-places", os.MFD_ALLOW_SEALING)
    os.ftruncate(plain, SIZE_BYTES)
    short = os.memfd_create("tfdp-places", os.MFD_ALLOW_SEALING)
    import fcntl

    fcntl.fcntl(short, fcntl.F_ADD_SEALS, SEALS)
    others = [reads, writes, plain, short]
    for descriptor in others:
        with pytest.raises(ValueError):
            open_slots(changed(own.offer, descriptor=descriptor))
    for descriptor in others:
        os.close(descriptor)
    own.close()


def share(pairs):
    """What the two workers of a ring of two agree on."""
    deadline = soon()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        return [
            agreed.result(HANG_SECONDS)
            for agreed in [threads.submit(share_memory, p, deadline) for p in pairs]
        ]


def ring_of_two(make=over_loopback):
    (to_1, from_0), (to_0, from_1) = make(), make()
    return [[(to_1, from_1)], [(to_0, from_0)]]


def test_processes_of_one_machine_share_memory_and_leave_nothing_open(slots):
    before = open_files()
    pairs = ring_of_two()
    ((first,), (second,)) = share(pairs)
    assert any("/memfd:" in what for _, what, _ in open_files() - before)
    assert first.after.proof == second.before.proof
    assert first.before.proof == second.after.proof
    first.after[SLOTS + 1][5] = 77
    assert second.before[1][5] == 77
    # Python's maps keep a descriptor each, as long as they are there.
    del first, second
    for connection in [c for of_worker in pairs for pair in of_worker for c in pair]:
        connection.close()
    assert not open_files() - before


def other_address():
    """As between two machines: the two ends have addresses of their own."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        source = ("127.0.0.2", 0)
        here = socket.create_connection(door.getsockname(), source_address=source)
        there, _ = door.accept()
    return here, there


def test_machines_share_nothing(slots):
    assert share(ring_of_two(other_address)) == [[(None, None)]] * 2


def test_what_cannot_be_made_or_opened_is_not_shared(slots, monkeypatch):
    monkeypatch.setattr("tfdp.hosts.shared_memory.CAN_SHARE", False)
    assert share(ring_of_two()) == [[(None, None)]] * 2
    monkeypatch.setattr("tfdp.hosts.shared_memory.CAN_SHARE", True)

    def refuse(offer):
        raise PermissionError("of another user")

    monkeypatch.setattr("tfdp.hosts.shared_memory.open_slots", refuse)
    assert share(ring_of_two()) == [[(None, None)]] * 2


@pytest.mark.parametrize(
    "line", [b"{}\n", b'{"opened": 1}\n', b"[]\n", b"\xff\n", b'{"opened": null}\n']
)
def test_an_answer_that_is_none_is_an_error(line):
    (to_1, from_1), (to_0, from_0) = over_loopback(), over_loopback()
    to_0.sendall(b"{}\n")  # the other one offers nothing
    from_1.sendall(line)
    with pytest.raises(NoAnswer) as caught:
        share_memory([(to_1, from_0)], soon())
    assert caught.value.is_after


@pytest.mark.parametrize("lost", ["before", "after", "after, late"])
def test_who_did_not_answer_is_known(lost):
    (to_1, from_1), (to_0, from_0) = over_loopback(), over_loopback()
    if lost == "before":
        to_0.close()
    else:
        to_0.sendall(b"{}\n")
    if lost == "after":
        from_1.close()
    deadline = time.monotonic() + 0.3 if lost == "after, late" else soon()
    with pytest.raises(NoAnswer) as caught:
        share_memory([(to_1, from_0)], deadline)
    assert caught.value.is_after == (lost != "before")
