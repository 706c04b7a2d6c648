"""Guests at every port of the workers: the job goes on, and they learn nothing.

`tests/processes/test_mpi.py` lets them knock at the ports of the engine "mpi".
"""

import concurrent.futures
import contextlib
import itertools
import socket
import threading
import time

import numpy as np
import pytest

from tests.support.guests import (
    KINDS,
    KNOW_THE_KEY,
    MOST_TOLD_BYTES,
    SLOW,
    GuestedDoors,
    can_use_ipv6,
    hello_of,
    recorded_hello,
)
from tests.support.open_files import open_files
from tests.support.workers import free_port
from tfdp.cluster import Cluster
from tfdp.errors import CollectiveError
from tfdp.hosts import listener, rendezvous
from tfdp.hosts.connect import MAGIC, NONCE_BYTES, PROOF_BYTES, dial, greet, job_secret
from tfdp.hosts.listener import is_loopback, listen_at
from tfdp.hosts.rendezvous import connect_workers
from tfdp.hosts.socket_link import SocketLink

SECRET = b"the secret of this job"
TIMEOUT_SECONDS = 60.0
ROWS = [
    pytest.param(kind, purpose, marks=[pytest.mark.slow] if kind in SLOW else [])
    for kind in KINDS
    for purpose in ("meeting", "ring")
]


def run_job(workers=3, address=None, secret=SECRET, timeout_seconds=TIMEOUT_SECONDS):
    """What the workers found: the sum of what they brought, or their errors."""
    address = address or f"127.0.0.1:{free_port()}"

    def run(rank):
        try:
            link = SocketLink(rank, workers, address, timeout_seconds, secret=secret)
        except CollectiveError as error:
            return error
        try:
            (total,) = link.sum([np.array([1.0, 10.0]) * 2.0**rank], "numbers")
            link.gather(b"", "the end")
            return total.tolist()
        finally:
            link.close()

    with concurrent.futures.ThreadPoolExecutor(workers) as threads:
        return list(threads.map(run, range(workers)))


def close_all(*meetings):
    for meeting in meetings:
        for connection in (
            *meeting.control.values(),
            *itertools.chain(*itertools.chain(*meeting.neighbours)),
        ):
            connection.close()


@pytest.mark.parametrize("kind, purpose", ROWS)
def test_a_guest_changes_nothing_and_learns_nothing(monkeypatch, kind, purpose):
    start = time.monotonic()
    with GuestedDoors(monkeypatch, kind, purpose, SECRET) as doors:
        assert run_job() == [[7.0, 70.0]] * 3
        assert time.monotonic() - start < TIMEOUT_SECONDS
        assert len(doors.guests) == {"meeting": 1, "ring": 3}[purpose]
        for guest in doors.guests:
            # A dripping guest notices with its next byte.
            assert guest.was_closed_out()
            assert b"addresses" not in guest.heard
            if kind not in KNOW_THE_KEY:
                knocks = 200 if kind == "200 at once" else 1
                assert len(guest.heard) <= knocks * MOST_TOLD_BYTES
        # Worker 0 meets the others on loopback: no port is open to the network.
        assert {host for host, _ in doors.listeners} == {"127.0.0.1"}


@pytest.mark.parametrize("kind", ["wrong key", "silence", "rank '1'", "JSON bomb"])
def test_a_meeting_with_guests_ends_in_time_and_counts_them(monkeypatch, kind):
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 0.3)
    with GuestedDoors(monkeypatch, kind, "meeting", SECRET):
        with pytest.raises(CollectiveError) as caught:
            connect_workers(0, 2, f"127.0.0.1:{free_port()}", 1, 1.0, SECRET)
    assert "worker 1 did not arrive at worker 0 in time" in str(caught.value)
    reason = {
        "wrong key": "it has another job key",
        "silence": "it did not say in time who it is",
        "rank '1'": "its hello is not one that a worker sends",
        "JSON bomb": "it does not speak the protocol",
    }[kind]
    words = f"This listener turned 1 other away, the last from 127.0.0.1: {reason}"
    assert words in str(caught.value)


def test_one_deadline_holds_for_a_whole_handshake(monkeypatch):
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 0.5)
    address = ("127.0.0.1", free_port())

    def drip(guest):
        # A byte in every 0.1 s: each alone is in time.
        with contextlib.suppress(OSError):
            for byte in MAGIC + bytes(NONCE_BYTES + PROOF_BYTES):
                guest.sendall(bytes([byte]))
                time.sleep(0.1)

    with listener.Listener(listen_at(*address), SECRET, "meeting", dict) as opened:
        with socket.create_connection(address) as guest:
            threading.Thread(target=drip, args=(guest,), daemon=True).start()
            end = time.monotonic() + TIMEOUT_SECONDS
            while not opened.turned_away and time.monotonic() < end:
                with pytest.raises(TimeoutError):
                    opened.next_worker(time.monotonic() + 0.1)
        assert opened.turned_away == 1
        assert "it did not say in time who it is" in opened.rejections()


def test_there_is_room_for_so_many_guests_and_always_for_a_worker(monkeypatch):
    monkeypatch.setattr(listener, "MOST_CANDIDATES", 4)
    listen, guests = rendezvous.listen_at, []

    def with_many_guests(*address):
        opened = listen(*address)
        guests.extend(socket.create_connection(address) for _ in range(20))
        return opened

    monkeypatch.setattr(rendezvous, "listen_at", with_many_guests)
    assert run_job() == [[7.0, 70.0]] * 3
    for guest in guests:
        guest.close()


def test_a_worker_of_another_key_is_told_and_the_job_goes_on(caplog):
    address = f"127.0.0.1:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        first = threads.submit(
            connect_workers, 0, 2, address, 1, TIMEOUT_SECONDS, SECRET
        )
        with pytest.raises(CollectiveError) as caught:
            connect_workers(1, 2, address, 1, 1.0, b"the secret of another job")
        assert "another job key (TFDP_JOB_KEY), or belongs to another job" in str(
            caught.value
        )
        assert not first.done()
        second = threads.submit(
            connect_workers, 1, 2, address, 1, TIMEOUT_SECONDS, SECRET
        )
        close_all(first.result(), second.result())
    said = [record.getMessage() for record in caplog.records]
    assert sum("from 127.0.0.1: it has another job key" in text for text in said) == 1


def test_jobs_with_names_are_told_apart_without_a_key(monkeypatch):
    monkeypatch.delenv("TFDP_JOB_KEY", raising=False)
    made = {
        (key, job): job_secret(Cluster(2, 0, "h:1", job_key=key, job=job))
        for key in (None, "k" * 16, "K" * 16)
        for job in ("", "Slurm 7.0", "Slurm 7.1")
    }
    assert len(set(made.values())) == len(made)
    monkeypatch.setenv("TFDP_JOB_KEY", "k" * 16)
    assert job_secret(Cluster(2, 0, "h:1")) == made["k" * 16, ""]


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_worker_that_was_started_again_takes_its_place(monkeypatch, place):
    let_in, go_on = threading.Semaphore(0), threading.Event()
    tell = rendezvous._tell

    def noting_tell(connection, message):
        tell(connection, message)
        if "wait_seconds" in message:
            let_in.release()
            go_on.wait(TIMEOUT_SECONDS)

    monkeypatch.setattr(rendezvous, "_tell", noting_tell)
    address = f"127.0.0.1:{free_port()}"
    where = rendezvous.parse_address(address)
    options = (3, address, 1, TIMEOUT_SECONDS, SECRET)
    with concurrent.futures.ThreadPoolExecutor(3) as threads:

        def come(rank):
            met = threads.submit(connect_workers, rank, *options)
            assert let_in.acquire(timeout=TIMEOUT_SECONDS)
            return met

        first = threads.submit(connect_workers, 0, *options)
        go_on.set()
        if place == "last":
            other = come(2)
            go_on.clear()
        until = time.monotonic() + TIMEOUT_SECONDS
        gone = dial(where, SECRET, "meeting", lambda _: hello_of("meeting"), until)
        assert let_in.acquire(timeout=TIMEOUT_SECONDS)
        # As the first it leaves while worker 0 waits for others already (or nearly);
        # as the last before worker 0 does anything else.
        time.sleep(0.2 if place == "first" else 0.0)
        gone.close()
        go_on.set()
        again = come(1)
        if place == "first":
            other = come(2)
        close_all(first.result(), again.result(), other.result())


def test_the_right_key_twice_takes_no_place_in_a_ring(monkeypatch):
    again = []

    def dial_twice(*arguments, **named):
        connection = dial(*arguments, **named)
        # While the other connections are still waited for.
        place = {"channel": 0, "distance": 1}
        if arguments[2] == "ring" and place.items() <= arguments[3](connection).items():
            again.append(dial(*arguments))
        return connection

    monkeypatch.setattr(rendezvous, "dial", dial_twice)
    assert run_job() == [[7.0, 70.0]] * 3
    assert len(again) == 3
    for connection in again:
        connection.settimeout(TIMEOUT_SECONDS)
        assert connection.recv(1) == b""
        connection.close()


# What a false worker 0 does with a worker that dials it.
def _answer(data):
    def answer(connection):
        connection.sendall(data)
        connection.recv(1 << 16)

    return answer


def _mirror(connection):
    while data := connection.recv(1 << 16):
        connection.sendall(data)


def _drip(connection):
    for byte in MAGIC + bytes(NONCE_BYTES + PROOF_BYTES):
        time.sleep(0.2)
        connection.sendall(bytes([byte]))


FALSE_COORDINATORS = {
    "silence": lambda connection: connection.recv(1),
    "closes": lambda connection: None,
    "random bytes": _answer(bytes(range(256))),
    "HTTP": _answer(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "JSON": _answer(b'{"addresses": [["127.0.0.1", 1]], "port_of_0": 1}\n'),
    "mirror": _mirror,
    "wrong proof": _answer(MAGIC + bytes(NONCE_BYTES + PROOF_BYTES)),
    "drip": _drip,
}


@pytest.mark.parametrize("kind", FALSE_COORDINATORS)
def test_a_false_worker_0_is_told_nothing(kind):
    heard = []

    def serve(server):
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                recorded = _Recorded(connection)
                heard.append(recorded)
                FALSE_COORDINATORS[kind](recorded)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        port = server.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(CollectiveError, match="did not find worker 0 of its job"):
            connect_workers(1, 2, f"127.0.0.1:{port}", 1, 1.0, SECRET)
        assert time.monotonic() - start < TIMEOUT_SECONDS
        server.shutdown(socket.SHUT_RDWR)
    thread.join(TIMEOUT_SECONDS)
    assert heard
    for connection in heard:
        # Its number, and a proof of that number: neither its rank nor its port.
        assert len(connection.heard) <= MOST_TOLD_BYTES + PROOF_BYTES
        assert b"rank" not in connection.heard


class _Recorded:
    """A connection that remembers what came."""

    def __init__(self, connection):
        self._connection = connection
        self.heard = b""
        self.sendall = connection.sendall

    def recv(self, size):
        data = self._connection.recv(size)
        self.heard += data
        return data


def test_the_true_worker_0_is_found_after_a_false_one():
    port = free_port()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        with socket.create_server(("127.0.0.1", port)) as false:
            second = threads.submit(
                connect_workers, 1, 2, f"127.0.0.1:{port}", 1, TIMEOUT_SECONDS, SECRET
            )
            connection, _ = false.accept()
            connection.close()
        first = threads.submit(
            connect_workers, 0, 2, f"127.0.0.1:{port}", 1, TIMEOUT_SECONDS, SECRET
        )
        close_all(first.result(), second.result())


def test_what_was_recorded_is_worth_nothing():
    said = recorded_hello(SECRET, "meeting")
    steps = greet(SECRET, "meeting", dict)
    wanted = next(steps)
    with pytest.raises(ConnectionError, match="another job key"):
        while True:
            if isinstance(wanted, bytes):
                wanted = steps.send(b"")
            else:
                data, said = said[:wanted], said[wanted:]
                wanted = steps.send(data)


def test_no_file_is_left_open_when_workers_do_not_meet():
    before = open_files()
    for rank in (0, 1):
        with pytest.raises(CollectiveError):
            connect_workers(rank, 3, f"127.0.0.1:{free_port()}", 2, 0.2, SECRET)
    assert not open_files() - before


@pytest.mark.parametrize("host", ["[::1]", "localhost", "127.0.0.1"])
def test_workers_meet_at_every_kind_of_address(host):
    if host == "[::1]" and not can_use_ipv6():
        pytest.skip("this machine has no IPv6")
    assert run_job(address=f"{host}:{free_port()}") == [[7.0, 70.0]] * 3


def names_resolve_to(monkeypatch, *addresses):
    def found(host, port, **options):
        return [(socket.AF_INET, 0, 0, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", found)


@pytest.mark.parametrize(
    "host, addresses, expected",
    [
        ("127.0.0.1", ["127.0.0.1"], {"127.0.0.1"}),
        ("localhost", ["127.0.0.1"], {"127.0.0.1"}),
        ("node1", ["127.0.0.2", "127.0.0.1"], {"::", "0.0.0.0"}),  # Debian's hosts file
        ("service", ["203.0.113.7"], {"::", "0.0.0.0"}),  # of another machine
        ("nowhere", [], {"::", "0.0.0.0"}),
    ],
)
def test_worker_0_listens_where_it_is_looked_for(
    monkeypatch, host, addresses, expected
):
    names_resolve_to(monkeypatch, *addresses)
    listeners = listen_at(host, free_port())
    found = {listener.getsockname()[0] for listener in listeners}
    for opened in listeners:
        opened.close()
    assert found <= expected and len(listeners) == 1


def test_a_port_that_is_taken_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(CollectiveError, match="Cannot listen on 127.0.0.1:"):
            connect_workers(0, 2, f"127.0.0.1:{taken.getsockname()[1]}", 1, 5.0)


def test_loopback_is_known():
    for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost", "LocalHost"):
        assert is_loopback(host)
    for host in ("10.0.0.1", "node1", "fd00::1", "0.0.0.0", "localhost.example"):
        assert not is_loopback(host)
