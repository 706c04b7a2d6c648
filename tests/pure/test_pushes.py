"""Hosts push to the owners of weights, which apply pushes in turn and check each."""

import threading
import time

import numpy as np
import pytest

from tests.pure.test_socket_link import on_workers
from tfdp.errors import CollectiveError, WorkerLostError
from tfdp.hosts.elastic_transfers import CHECKSUM, as_bytes
from tfdp.hosts.pushes import IndexedRows, Layouts, PushLink

SHAPES = [(7, 3), (5,), (1,)]
# Exact in float32: small multiples of powers of two.
RATE = 0.5


class NumbersOwner:
    """w <- w - rate / max(1, staleness) g."""

    def __init__(self, layouts, rank):
        self.layouts, self.rank, self.version = layouts, rank, 0
        self.parts = [
            np.zeros(layouts.length(place, rank), "float32")
            for place in range(len(SHAPES))
        ]
        self.log = []

    def apply(self, push):
        staleness = self.version - push.version
        for place, part in push.parts.items():
            dense = self.layouts.dense(part, place, self.rank)
            self.parts[place] = (
                self.parts[place] - push.rate / max(1, staleness) * dense
            )
        self.log.append((push.rank, staleness))
        self.version += 1

    def weights(self):
        return [part.copy() for part in self.parts]


def made(link):
    layouts = Layouts(SHAPES, link.workers)
    owner = NumbersOwner(layouts, link.rank)
    types = [np.dtype("float32")] * len(SHAPES)
    names = ["table", "vector", "number"]
    return owner, PushLink(link, b"", owner, layouts, types, "pushes of a test", names)


def gradients_of(rank):
    """A table of which a host has rows, a vector and a number."""
    rng = np.random.default_rng(rank)
    rows = np.array([rank, 3, 6])
    values = rng.integers(-8, 8, (3, 3)).astype("float32")
    vector, number = rng.integers(-8, 8, 5), rng.integers(-8, 8, 1)
    return {
        0: IndexedRows(rows, values),
        1: vector.astype("f4"),
        2: number.astype("f4"),
    }


def dense(gradients):
    table = np.zeros(SHAPES[0], "float32")
    table[gradients[0].indices] = gradients[0].values
    return [table, gradients[1], gradients[2]]


@pytest.mark.parametrize("hosts", [2, 3, 8])
def test_parts_of_rows_are_those_of_the_whole(hosts):
    layouts, gradients = Layouts(SHAPES, hosts), gradients_of(1)
    for place, whole in enumerate(dense(gradients)):
        parts = [
            layouts.dense(layouts.part_of(gradients[place], place, owner), place, owner)
            for owner in range(hosts)
        ]
        np.testing.assert_array_equal(np.concatenate(parts), whole.reshape(-1))


def test_owners_apply_pushes_in_turn_with_their_staleness():
    """Each host pushes twice, one host after the other, by the weights of the start."""
    turns = [threading.Event() for _ in range(4)]
    turns[0].set()

    def work(link):
        owner, pushes = made(link)
        pushes.begin()
        turns[link.rank].wait(60)
        for rate in (RATE, 2 * RATE):
            last = pushes.push(rate, gradients_of(link.rank))
        turns[link.rank + 1].set()
        pushes.meet("end")
        pulled = pushes.push(RATE, {})
        return owner.log, owner.version, last, pulled

    results = on_workers(3, work)
    expected = [np.zeros(shape, "float32") for shape in SHAPES]
    for rank in range(3):
        # Two pushes of each host before it: the second push of a host is not stale.
        for staleness, rate in ((2 * rank, RATE), (0, 2 * RATE)):
            for weights, gradient in zip(
                expected, dense(gradients_of(rank)), strict=True
            ):
                weights -= np.float32(rate / max(1, staleness)) * gradient
        for weights, own in zip(expected, results[rank][2], strict=True):
            np.testing.assert_array_equal(own, weights)
    for log, version, _, pulled in results:
        assert log == [(0, 0), (0, 0), (1, 2), (1, 0), (2, 4), (2, 0)]
        assert version == 6  # a pull is no update
        for weights, own in zip(expected, pulled, strict=True):
            np.testing.assert_array_equal(own, weights)


def test_a_push_waits_for_an_owner_that_has_not_begun():
    begun = threading.Event()

    def work(link):
        owner, pushes = made(link)
        if link.rank:
            begun.wait(60)
            assert owner.version == 0
            time.sleep(0.3)
            assert owner.version == 0
            pushes.begin()
        else:
            pushes.begin()
            threading.Timer(0.1, begun.set).start()
            pushes.push(RATE, gradients_of(0))
        pushes.meet("end")
        return owner.version

    assert on_workers(2, work) == [1, 1]


def meet_after_failure(link, pushes):
    """Worker 1 comes when worker 0 has refused its push."""
    until = time.monotonic() + 60
    while link.rank and link.news() is None and time.monotonic() < until:
        time.sleep(0.01)
    pushes.meet("end")


RIGHT = {"generation": 1, "version": 0, "rate": 0.5, "parts": []}
WRONG = {
    "no generation": {"generation": None},
    "an old generation": {"generation": 0},
    "a version that is not made yet": {"version": 1},
    "a version below 0": {"version": -1},
    "no rate": {"rate": "fast"},
    "a rate that is not finite": {"rate": float("inf")},
    "no parts": {"parts": 3},
    "no part": {"parts": [[0]]},
    "an unknown weight": {"parts": [[3, -1]]},
    "too many rows": {"parts": [[0, 5]]},
    "too many parts": {"parts": [[0, 0]] * 4},
    "a part twice": {"parts": [[1, 0], [1, 0]]},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_push_that_no_worker_makes_ends_the_training(wrong):
    """The owner names the worker, and applies nothing."""

    def work(link):
        owner, pushes = made(link)
        pushes.begin()
        if link.rank:
            pushes._wires[0].send_line(RIGHT | wrong)
        meet_after_failure(link, pushes)
        assert owner.version == 0

    found = on_workers(2, work)
    assert isinstance(found[0], CollectiveError)
    assert "a push of worker 1 to worker 0 failed" in str(found[0])


@pytest.mark.parametrize("indices", [[2, 1], [1, 1], [-1, 1], [2, 4]])
def test_rows_that_are_no_rows_of_the_part_are_refused(indices):
    """Owner 0 of two has the elements 0 to 10 of rows of 3: rows 0 to 3."""

    def work(link):
        owner, pushes = made(link)
        pushes.begin()
        if link.rank:
            pushes._wires[0].send_line(RIGHT | {"parts": [[0, 2]]})
            values = np.ones((2, 3), "float32")
            pushes._wires[0].send(np.array(indices), values)
        meet_after_failure(link, pushes)
        assert owner.version == 0

    found = on_workers(2, work)
    assert "the gradient of table: not the rows of a table" in str(found[0])


def send_damaged(wire, array):
    """Sends it as if a bit had changed on the way."""
    wire._send(as_bytes(array))
    wire._send(memoryview(b"\x01" * CHECKSUM.size))


def test_a_damaged_push_is_named():
    def work(link):
        owner, pushes = made(link)
        pushes.begin()
        if link.rank:
            wire = pushes._wires[0]
            wire.send_line(RIGHT | {"parts": [[1, -1]]})
            send_damaged(wire, np.ones(owner.layouts.length(1, 0), "float32"))
        meet_after_failure(link, pushes)
        assert owner.version == 0

    for error in on_workers(2, work):
        assert isinstance(error, CollectiveError)
        for part in ("a push of worker 1 to worker 0", "gradient of vector", "damaged"):
            assert part in str(error)


def test_a_damaged_answer_is_named():
    def work(link):
        owner, pushes = made(link)
        if not link.rank:
            serve = owner.weights
            # Of another type, so of other bytes than worker 1 expects.
            owner.weights = lambda: [serve()[0], serve()[1].astype("float16"), *serve()]
        pushes.begin()
        if link.rank:
            pushes.push(RATE, gradients_of(1))
        meet_after_failure(link, pushes)

    error = on_workers(2, work)[1]
    assert isinstance(error, WorkerLostError)
    assert "pushed to worker 0" in str(error) and "the value of vector" in str(error)


def test_hosts_that_meet_at_different_places_say_so():
    def work(link):
        _, pushes = made(link)
        pushes.begin()
        pushes.meet(f"end {link.rank}")

    for error in on_workers(2, work):
        assert "worker 0 at the end 0; worker 1 at the end 1" in str(error)


def test_a_host_that_neither_comes_nor_pushes_is_named():
    ended = threading.Event()

    def work(link):
        _, pushes = made(link)
        pushes.begin()
        if link.rank == 1:
            ended.wait(60)
            return None
        try:
            pushes.meet("end of an epoch")
        finally:
            ended.set()

    found = on_workers(3, work, timeout_seconds=2)
    said = [str(found[0]), str(found[2])]
    assert all(isinstance(found[rank], WorkerLostError) for rank in (0, 2))
    assert all("worker 1 did not arrive within 2 seconds" in text for text in said)


def test_a_host_that_pushes_is_waited_for():
    """For longer than the deadline, which starts again with each push."""

    def work(link):
        owner, pushes = made(link)
        pushes.begin()
        for _ in range(6 if link.rank else 1):
            time.sleep(0.5 * link.rank)
            pushes.push(RATE, gradients_of(link.rank))
        pushes.meet("end")
        return owner.version

    assert on_workers(2, work, timeout_seconds=2) == [7, 7]


def test_a_host_that_ends_is_named_by_who_pushes():
    def work(link):
        _, pushes = made(link)
        pushes.begin()
        if link.rank == 1:
            pushes.close()  # as the end of a process does
            return None
        while True:
            pushes.push(RATE, gradients_of(0))
            time.sleep(0.01)

    found = on_workers(2, work)
    assert isinstance(found[0], WorkerLostError)
    assert (
        "Worker 0 pushed to worker 1 (pushes of a test): worker 1 has come to the"
        in (str(found[0]))
    )
