"""Workers on threads of one process meet, exchange, and refuse what does not fit."""

import concurrent.futures
import socket
import threading
import time

import numpy as np
import pytest

from tests.support.workers import free_port
from tfdp.errors import CollectiveError, WorkerLostError
from tfdp.hosts import rendezvous
from tfdp.hosts.rendezvous import parse_address
from tfdp.hosts.socket_link import SocketLink


def on_workers(workers, work, **options):
    """Results, or errors, of `work(link)` on each worker."""
    address = f"127.0.0.1:{free_port()}"
    all_have_met = threading.Barrier(workers, timeout=60)

    def run(rank):
        try:
            link = SocketLink(
                rank, workers, address, **{"timeout_seconds": 5, **options}
            )
        except BaseException:
            all_have_met.abort()
            raise
        try:
            # Who gives up at once would end the others while they still meet.
            all_have_met.wait()
            return work(link)
        except CollectiveError as error:
            return error
        finally:
            link.close()

    with concurrent.futures.ThreadPoolExecutor(workers) as threads:
        return list(threads.map(run, range(workers)))


@pytest.mark.parametrize("workers", [2, 3])
def test_sums_and_gathers_in_order(workers):
    def work(link):
        gathered = link.gather(b"x" * link.rank, "names")
        sums = link.sum([np.full(10_000, link.rank + 1.0), np.array(2.0)], "numbers")
        return gathered, sums

    for gathered, (many, one) in on_workers(workers, work):
        assert gathered == [b"x" * rank for rank in range(workers)]
        np.testing.assert_array_equal(many, workers * (workers + 1) / 2)
        assert many.shape == (10_000,) and one.shape == () and one == 2.0 * workers


@pytest.mark.parametrize("way", ["ring", None])
def test_arrays_that_were_joined_have_the_bits_of_each_by_itself(way):
    # Three workers: which of them adds first depends on the place in the whole.
    rng = np.random.default_rng(5)
    arrays = rng.normal(size=(3, 1000)).astype("float32")
    edges = [3, 17, 600]

    def work(link):
        link.take_way(way)
        mine = arrays[link.rank]
        apart = link.sum(np.split(mine, edges), "apart")
        packed = [[[3], [14]], [], []]
        parts = np.split(mine, edges[1:])
        return np.concatenate(apart), np.concatenate(
            link.sum(parts, "joined", packed=packed)
        )

    for apart, joined in on_workers(3, work):
        assert apart.tobytes() == joined.tobytes()
        np.testing.assert_allclose(apart, arrays.sum(axis=0), atol=1e-6)


def test_pieces_need_not_lie_together_in_memory():
    def work(link):
        piece = np.arange(8, dtype="float32")[::2] + link.rank
        (whole,) = link.all_gather([piece], [[(0, 4), (4, 8)]], "strided")
        return whole

    for whole in on_workers(2, work):
        np.testing.assert_array_equal(whole, [0, 2, 4, 6, 1, 3, 5, 7])


@pytest.mark.parametrize("workers", [2, 3])
def test_each_half_of_a_sum_sends_its_share_of_the_bytes(workers):
    sizes = [3000, 60]
    ranges = [
        [(n * r // workers, n * (r + 1) // workers) for r in range(workers)]
        for n in sizes
    ]
    header = 24

    def work(link):
        arrays = [np.arange(n) * (link.rank + 1.0) for n in sizes]
        pieces = link.reduce_scatter(arrays, ranges, "scatter")
        scattered = link.sent_bytes()
        wholes = link.all_gather(pieces, ranges, "gather")
        return scattered, link.sent_bytes() - scattered, wholes

    share = sum(sizes) * 8 * (workers - 1) // workers
    for scattered, gathered, wholes in on_workers(workers, work):
        assert scattered == gathered == share + header
        for n, whole in zip(sizes, wholes, strict=True):
            factor = workers * (workers + 1) / 2
            np.testing.assert_array_equal(whole, np.arange(n) * factor)


def test_channels_keep_orders_of_their_own():
    def work(link):
        channels = ["host", "step"] if link.rank else ["step", "host"]
        found = {}
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            for channel in channels:
                value = np.array(10.0 if channel == "step" else 1.0)
                found[channel] = threads.submit(link.sum, [value], channel, channel)
            return {name: float(future.result()[0]) for name, future in found.items()}

    assert on_workers(2, work) == [{"step": 20.0, "host": 2.0}] * 2


def test_notes_need_no_common_order():
    def work(link):
        keys = [f"key {i}" for i in range(20)]
        with concurrent.futures.ThreadPoolExecutor(20) as threads:
            asked = keys if link.rank else keys[::-1]
            found = list(
                threads.map(lambda k: link.share_note(k, f"{k} of {link.rank}"), asked)
            )
        return dict(zip(asked, found, strict=True))

    for notes in on_workers(3, work):
        assert notes["key 7"] == {rank: f"key 7 of {rank}" for rank in range(3)}


def test_a_note_that_never_comes_is_an_error():
    def work(link):
        return link.share_note("only one", "x") if link.rank == 0 else link.rank

    error, _ = on_workers(2, work)
    assert isinstance(error, WorkerLostError)
    assert "'only one'" in str(error)


def test_workers_out_of_step_are_told():
    def work(link):
        return link.sum([np.zeros(3 + link.rank)], "weights")

    for rank, error in enumerate(on_workers(2, work)):
        assert isinstance(error, CollectiveError)
        assert f"out of step: worker {rank} is at exchange 1, sum of" in str(error)
        assert "(weights)" in str(error)


def test_a_late_worker_is_named():
    def work(link):
        return link.rank if link.rank == 1 else link.sum([np.zeros(2)], "first")

    error, _ = on_workers(2, work)
    assert isinstance(error, WorkerLostError)
    assert "worker 1 has come to the end of its script" in str(error)
    assert "docs/how-hosts-work.md#what-every-worker-must-call" in str(error)
    assert "first error" not in str(error)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("raises", [True, False])
def test_who_leaves_is_not_waited_for_in_a_note(workers, raises):
    def work(link):
        if link.rank != 1:
            link.share_note("dataset 0", "here")
        elif raises:
            try:
                raise ValueError("the first error")
            except ValueError:
                link.close()

    start = time.monotonic()
    errors = on_workers(workers, work, timeout_seconds=120)
    assert time.monotonic() - start < 100  # not the links' own deadline
    word = "raised ValueError: the first error" if raises else "come to the end"
    assert f"worker 1 has {word}" in str(errors[0])
    # Perhaps they have heard of worker 0 by then, which closed its link in turn.
    assert all(isinstance(error, WorkerLostError) for error in errors[2:])


@pytest.mark.parametrize(
    "ranks, sizes, words",
    [
        ((0, 1, 1), (3, 3, 3), "Two workers say that they are worker 1"),
        ((0, 1), (2, 3), "Worker 1 says workers=3, worker 0 says 2"),
        ((0, 2), (3, 3), "worker 1 did not arrive at worker 0 in time"),
    ],
)
def test_a_meeting_that_cannot_be_is_refused_everywhere(ranks, sizes, words):
    address = f"127.0.0.1:{free_port()}"

    def join(rank, workers):
        with pytest.raises(CollectiveError) as caught:
            SocketLink(rank, workers, address, timeout_seconds=2)
        return str(caught.value)

    with concurrent.futures.ThreadPoolExecutor(len(ranks)) as threads:
        messages = list(threads.map(join, ranks, sizes))
    assert words in messages[0]
    assert any(words in message for message in messages[1:])


@pytest.mark.parametrize("comes", [True, False])
def test_who_came_first_waits_as_long_as_worker_0(comes, monkeypatch):
    monkeypatch.setattr(rendezvous, "HANDSHAKE_SECONDS", 0.5)
    address = f"127.0.0.1:{free_port()}"
    # Worker 1 has this long to reach worker 0, which listens by then.
    own_seconds = 3
    own_time_is_over = threading.Event()

    def join(rank):
        seconds = 60 if comes else 2 * own_seconds
        if rank == 1:
            seconds = own_seconds
            wait_until_heard(address)
            threading.Timer(own_seconds + 1, own_time_is_over.set).start()
        if rank == 2 and not (comes and own_time_is_over.wait(60)):
            return None
        try:
            link = SocketLink(rank, 3, address, timeout_seconds=seconds)
        except CollectiveError as error:
            return str(error)
        link.close()
        return "met"

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        words = list(threads.map(join, range(3)))
    if comes:
        assert words == ["met"] * 3
    else:
        assert "worker 2 did not arrive at worker 0 in time" in words[0]
        assert words[1] == words[0]


def wait_until_heard(address):
    """Returns when somebody listens at `address`, to whom this is a stranger."""
    while True:
        try:
            socket.create_connection(parse_address(address), timeout=60).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.01)


def test_strangers_at_the_door_do_not_matter():
    address = f"127.0.0.1:{free_port()}"

    def stranger():
        host, port = parse_address(address)
        for _ in range(100):
            try:
                with socket.create_connection((host, port), timeout=1) as connection:
                    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                return
            except OSError:
                continue

    def worker(rank):
        link = SocketLink(rank, 2, address, timeout_seconds=10)
        (total,) = link.sum([np.array(rank + 1)], "total")
        link.close()
        return int(total)

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        first = threads.submit(worker, 0)
        threads.submit(stranger).result()
        second = threads.submit(worker, 1)
        assert [first.result(), second.result()] == [3, 3]


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":80", "host:port", "h:70000"]
)
def test_addresses_are_checked(address):
    with pytest.raises(CollectiveError, match="host:port"):
        parse_address(address)
