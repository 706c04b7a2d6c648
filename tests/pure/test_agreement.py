"""Every worker brings the same to an exchange, or hears what the others brought."""

import concurrent.futures
import json
import re

import numpy as np
import pytest

from tests.pure.test_socket_link import on_workers
from tfdp.errors import CollectiveError
from tfdp.hosts.collective_fingerprint import (
    HEADER,
    CollectiveMismatch,
    Fingerprint,
    difference,
    fingerprint_of,
)

HALVES = [[(0, 2), (2, 4)]]
THIRD = [[(0, 1), (1, 4)]]


def sum_of(values, dtype, **options):
    return lambda link: link.sum([np.array(values, dtype)], "weights", **options)


def scatter(ranges, label="weights"):
    return lambda link: link.reduce_scatter([np.arange(4.0)], ranges, label)


def gather_pieces(ranges, sizes=(2, 2), dtype="float64"):
    return lambda link: link.all_gather(
        [np.ones(sizes[link.rank], dtype)], ranges, "weights"
    )


# What worker 0 does, what worker 1 does, and what both say of worker 0's and 1's part.
# The bytes are alike in all but the last.
APART = {
    "types": (
        sum_of([1, 2], "float32"),
        sum_of([3, 4], "int32"),
        (
            "sum of 8 bytes: float32 [2] (weights)",
            "sum of 8 bytes: int32 [2] (weights)",
        ),
    ),
    "shapes": (
        sum_of([[1, 2]], "float32"),
        sum_of([[1], [2]], "float32"),
        ("float32 [1, 2] (weights)", "float32 [2, 1] (weights)"),
    ),
    "what arrays were packed from": (
        sum_of([1, 2, 3], "float32", packed=[[[1], [2]]]),
        sum_of([1, 2, 3], "float32", packed=[[[2], [1]]]),
        ("float32 [1], float32 [2] (weights)", "float32 [2], float32 [1] (weights)"),
    ),
    "one tensor, and two of the same bytes": (
        sum_of([1, 2, 3], "float32", packed=[[]]),
        sum_of([1, 2, 3], "float32", packed=[[[2], [1]]]),
        ("float32 [3] (weights)", "float32 [2], float32 [1] (weights)"),
    ),
    "labels": (
        scatter(HALVES),
        scatter(HALVES, "biases"),
        ("float64 [4] in [(0, 2), (2, 4)] (weights)", "(2, 4)] (biases)"),
    ),
    "ranges to scatter": (
        scatter(HALVES),
        scatter(THIRD),
        ("in [(0, 2), (2, 4)] (weights)", "in [(0, 1), (1, 4)] (weights)"),
    ),
    "ranges to gather": (
        gather_pieces(HALVES),
        gather_pieces(THIRD, sizes=(1, 3)),
        ("in [(0, 2), (2, 4)] (weights)", "in [(0, 1), (1, 4)] (weights)"),
    ),
    "wire types": (
        sum_of([1, 2], "float32", wire_dtype="bfloat16"),
        sum_of([1, 2], "float32", wire_dtype="float16"),
        ("4 bytes as bfloat16: float32 [2]", "4 bytes as float16: float32 [2]"),
    ),
    "labels of bytes": (
        lambda link: link.gather(b"one", "seed", most_bytes=8),
        lambda link: link.gather(b"two", "settings", most_bytes=8),
        (
            "gather of at most 8 bytes each (seed)",
            "gather of at most 8 bytes each (settings)",
        ),
    ),
    "kinds": (
        scatter(HALVES),
        gather_pieces(HALVES),
        ("scatter of 32 bytes", "shards of 32 bytes"),
    ),
}


@pytest.mark.parametrize("what", APART)
def test_nothing_is_added_up_that_differs(what):
    first, second, words = APART[what]
    errors = on_workers(2, lambda link: (second if link.rank else first)(link))
    for rank, error in enumerate(errors):
        assert type(error) is CollectiveError, error
        assert "Workers are out of step" in str(error)
        for worker in (rank, 1 - rank):
            part = rf"worker {worker} (is )?at exchange 1, .*{re.escape(words[worker])}"
            assert re.search(part, str(error)), str(error)


def test_the_first_array_that_differs_is_told():
    def work(link):
        arrays = [np.zeros(3 + n, np.float32) for n in range(40)]
        arrays[17] = arrays[17].astype("int32" if link.rank else "float32")
        return link.sum(arrays, "bucket")

    for error in on_workers(2, work):
        assert "40 arrays, number 18 of them float32 [20]" in str(error)
        assert "40 arrays, number 18 of them int32 [20]" in str(error)


@pytest.mark.parametrize(
    "place, words", [(17, "number 17 of them"), (901, "the first 500 are identical")]
)
def test_of_many_that_were_packed_the_first_that_differs_is_told(place, words):
    def work(link):
        shapes = [[2 + n % 2] for n in range(1000)]
        if link.rank:  # two change places: all has the same bytes
            shapes[place - 1 : place + 1] = [[3], [2]]
        size = sum(shape[0] for shape in shapes)
        return link.sum([np.zeros(size, np.float32)], "bucket", packed=[shapes])

    for error in on_workers(2, work):
        assert str(error).count("1000 arrays") == 2 and words in str(error)
        assert len(str(error)) < 2000


def test_with_three_workers_nobody_goes_on_and_nobody_waits():
    """Worker 1 agrees with the one before it, and waits for what never comes."""

    def work(link):
        values = np.array([1, 2], "int32" if link.rank == 2 else "float32")
        return link.sum([values], "weights")

    for error in on_workers(3, work):
        assert isinstance(error, CollectiveError), error
        assert "Workers are out of step" in str(error)


def test_what_follows_a_failed_exchange_is_refused():
    """What is under way in the ring would be taken for the next exchange's numbers."""

    def work(link):
        with pytest.raises(CollectiveError):
            link.sum([np.array([1.0 + link.rank] * (1 + link.rank))], "first")
        return link.sum([np.array([1.0])], "second")

    for error in on_workers(2, work):
        assert isinstance(error, CollectiveError)
        assert "After an exchange that failed there is no other (second)" in str(error)
        assert "Workers are out of step" in str(error)


def test_numbers_that_keras_gives_names_may_differ():
    """A model that only one worker made moves the numbers of its later layers."""

    def work(link):
        names = ("dense_1/kernel", "batch_normalization_12/gamma:0")
        labels = [
            n if link.rank else n.replace("_12", "").replace("_1/", "/") for n in names
        ]
        return [link.gather(b"x", f"variable {label}") for label in labels]

    assert on_workers(2, work) == [[[b"x", b"x"]] * 2] * 2


def test_the_header_keeps_its_size():
    assert HEADER.size == 24
    terms = Fingerprint("mpi shards", 2**40 + 3, 2**40, "label")
    assert len(terms.header) == 24


def noted(**changes):
    terms = fingerprint_of("sum", 7, [np.zeros(2, np.int32)], "weights")
    return json.dumps({**json.loads(terms.note), **changes})


@pytest.mark.parametrize(
    "note",
    [
        *[None, "", "[]", '{"arrays": 3}', "{", '{"a": 1}'],
        *[noted(number="7"), noted(number=True), noted(size_bytes=None)],
        *[noted(left_out=-1), noted(label=3), noted(kind="sums"), noted(kind=[])],
    ],
)
def test_without_the_others_note_its_header_is_told(note):
    mine = fingerprint_of("sum", 7, [np.zeros(2, np.float32)], "weights")
    theirs = fingerprint_of("sum", 7, [np.zeros(2, np.int32)], "weights")
    words = difference(0, 1, CollectiveMismatch(mine, theirs.header), note)
    assert "worker 0 is at exchange 7, sum of 8 bytes: float32 [2] (weights)" in words
    assert "worker 1 at exchange 7, sum of 8 bytes, with another label, types" in words


def test_a_note_of_another_exchange_is_not_taken_for_this_one():
    mine = fingerprint_of("sum", 7, [np.zeros(2, np.float32)], "weights")
    theirs = fingerprint_of("gather", 8, (), "rows", limit=64)
    words = difference(0, 1, CollectiveMismatch(mine, theirs.header), mine.note)
    assert words.endswith("worker 1 at exchange 8, gather of at most 64 bytes each")


def test_threads_of_one_worker_take_turns():
    def work(link):
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            sums = threads.map(lambda _: link.sum([np.ones(5)], "one"), range(20))
            return [float(total[0]) for (total,) in sums]

    assert on_workers(2, work) == [[2.0] * 20] * 2


def test_long_pieces_that_differ_are_told_before_all_of_them_is_sent():
    """A piece is on its way before the other's header is here; nobody takes its end."""
    size = 30_000_000  # more than sockets keep
    ranges = [[(0, size), (size, 2 * size)]]

    def work(link):
        piece = np.zeros(size, np.uint8)
        return link.all_gather([piece], ranges, f"of worker {'ab'[link.rank]}")

    for error in on_workers(2, work):
        assert type(error) is CollectiveError, error
        assert "Workers are out of step" in str(error)
