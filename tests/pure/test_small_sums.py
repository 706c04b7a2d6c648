"""Sums and gathers in few rounds: the bits of the ring, the rounds of the formula."""

import math
import socket
import warnings

import numpy as np
import pytest

from tests.pure.test_ring import on_threads
from tests.pure.test_socket_link import on_workers
from tests.support.mesh import bits, on_mesh
from tests.support.tcp_counts import handed_to_tcp
from tfdp.hosts import shared_memory
from tfdp.hosts.recursive_doubling import SmallSum, gather_blobs, gather_rows, swap_rows
from tfdp.hosts.ring import Ends, ring_sum
from tfdp.hosts.shared_memory import CAN_SHARE
from tfdp.plan.sum_ways import rounds, sent_bytes

WAYS = ("gather", "doubling")
WAYS_OF_LINKS = ("ring", *WAYS)
WORKERS = (2, 3, 4, 5, 7, 8, 13)
SIZES = [(1000,), (3,), (7, 40), (), (0,)]


def arrays_of(rank, dtype, shapes=SIZES):
    rng = np.random.default_rng(rank)
    return [(rng.normal(size=shape) * 10).astype(dtype).reshape(-1) for shape in shapes]


def ring_sums(workers, make):
    def work(rank, send, receive):
        inputs = make(rank)
        outputs = [np.full_like(array, 7) for array in inputs]
        ring_sum(inputs, outputs, rank, workers, Ends(send, receive))
        return outputs

    return on_threads(workers, work)


def small_sums(way, workers, make):
    """Everybody's sums, and the ends of each."""

    def work(rank, ends):
        inputs = make(rank)
        before = bits(inputs)
        outputs = [np.full_like(array, 7) for array in inputs]
        small = SmallSum(way, inputs, rank, workers)
        ends[0].send(small.first)
        small.run(outputs, ends)
        assert bits(inputs) == before
        return outputs

    return on_mesh(workers, work)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workers", WORKERS)
def test_every_worker_gets_the_bits_of_the_ring(workers, way):
    """Of numbers whose sum depends on the order: equal bits show the order."""
    expected = ring_sums(workers, lambda rank: arrays_of(rank, "float32"))
    results, _ = small_sums(way, workers, lambda rank: arrays_of(rank, "float32"))
    for result in results:
        assert bits(result) == bits(expected[0])
    if workers > 2:  # two numbers have one sum
        in_order = sum(arrays_of(rank, "float32")[0] for rank in range(workers))
        assert (in_order != expected[0][0]).any()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "dtype", ["float64", "float16", "bfloat16", "int8", "int32", "int64", "bool"]
)
def test_types_stay_what_they_are(way, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    expected = ring_sums(5, lambda rank: arrays_of(rank, dtype))
    results, _ = small_sums(way, 5, lambda rank: arrays_of(rank, dtype))
    for result in results:
        assert [array.dtype for array in result] == [np.dtype(dtype)] * len(SIZES)
        assert bits(result) == bits(expected[0])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shapes", [[(0,)], [()], [(2,)], [(70_000,)]])
def test_of_no_number_one_fewer_than_workers_and_many(way, shapes):
    def make(rank):
        return arrays_of(rank, "float32", shapes)

    expected = ring_sums(3, make)
    for result in small_sums(way, 3, make)[0]:
        assert bits(result) == bits(expected[0])


@pytest.mark.parametrize("way", WAYS)
def test_infinities_are_added_silently(way):
    rows = [[np.inf, 3e38, 1.0, -np.inf], [-np.inf, 3e38, 1.0, 1.0]]

    def make(rank):
        return [np.array(rows[rank], np.float32)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results, _ = small_sums(way, 2, make)
    for (result,) in results:
        np.testing.assert_array_equal(result, [np.nan, np.inf, 2.0, -np.inf])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workers", [*range(2, 10), 16, 33, 64])
def test_rounds_and_bytes_are_those_of_the_formula(workers, way):
    """A round is one message to one other worker."""
    elements = 2 * workers  # no padding
    _, ends = small_sums(way, workers, lambda rank: [np.ones(elements, np.float32)])
    expected = sent_bytes(way, 4 * elements, workers)
    for of_worker in ends:
        counted = sum(end.messages for end in of_worker)
        assert counted == rounds(way, workers) <= 2 * math.ceil(math.log2(workers))
        assert sum(end.sent_bytes for end in of_worker) == round(expected)


@pytest.mark.parametrize("workers", [*range(2, 10), 64])
def test_rows_and_blobs_reach_everybody(workers):
    def work(rank, ends):
        rows = np.full((workers, 2), -1)
        rows[0] = rank
        gather_rows(rows, ends)
        assert rows[:, 1].tolist() == [(rank - d) % workers for d in range(workers)]
        sent = np.array([100 * rank + d for d in range(workers)])
        came = swap_rows(sent, ends)
        assert came.tolist() == [
            100 * ((rank - d) % workers) + d for d in range(workers)
        ]
        blobs = gather_blobs(b"x" * rank, rank, workers, workers, ends)
        assert blobs == [b"x" * other for other in range(workers)]
        return sum(end.messages for end in ends)

    results, _ = on_mesh(workers, work)
    assert results == [3 * math.ceil(math.log2(workers))] * workers


@pytest.mark.parametrize("workers", [2, 3, 6])
@pytest.mark.parametrize("shares", [False, True])
def test_all_ways_give_one_sum_over_sockets(monkeypatch, workers, shares):
    monkeypatch.setattr(shared_memory, "CAN_SHARE", shares and CAN_SHARE)
    shapes = [(3,), (), (70, 9)]

    def work(link):
        arrays = [a.reshape(s) for a, s in zip(made(link.rank), shapes, strict=True)]
        sums = []
        for way in WAYS_OF_LINKS:
            link.take_way(way)
            sums.append(bits(link.sum(arrays, "numbers")))
        before = link.sent_bytes()
        link.take_way("doubling")
        link.sum([np.ones(2 * workers, np.float32)], "numbers")
        counted = link.sent_bytes() - before
        link.take_way(None)
        assert link.way_of_sum(4) == "gather"
        link.gather(b"", "the end")
        return sums, counted

    def made(rank):
        return arrays_of(rank, "float32", shapes)

    results = on_workers(workers, work)
    header = 24
    for sums, counted in results:
        assert sums == [results[0][0][0]] * len(WAYS_OF_LINKS)
        assert counted == header + round(sent_bytes("doubling", 8 * workers, workers))


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="the kernel does not tell")
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_the_kernel_counts_the_same_bytes(monkeypatch, workers):
    # What lies in shared memory never comes to it.
    monkeypatch.setattr(shared_memory, "CAN_SHARE", False)

    def work(link):
        handed, sent = handed_to_tcp(link), link.sent_bytes()
        for size in (1, 7, 1000, 30_000, 300_000):
            link.sum([np.ones(size, np.float32)], "numbers")
            link.sum([np.ones(size)], "numbers", "late")
        link.gather(b"x" * 1000 * link.rank, "words")
        link.all_to_all(np.ones((workers, 50)), "rows")
        counts = handed_to_tcp(link) - handed, link.sent_bytes() - sent
        link.gather(b"", "the end")
        return counts

    for handed, sent in on_workers(workers, work):
        assert handed == sent > 0
