"""Sums whose parts travel in 16 bits: bounds, equal bits, overflow, bytes."""

import warnings

import numpy as np
import pytest

from tests.pure.test_ring import on_threads
from tests.pure.test_socket_link import on_workers
from tfdp.hosts.ring import Ends, RoundedWire, part_edges, ring_sum, wire_type

SHAPES = [(1000,), (3,), (7, 40), (), (0,)]
# Half a unit in the last place of 8 and 11 significant bits.
ROUND_OFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def arrays_of(rank):
    rng = np.random.default_rng(rank)
    return [rng.normal(size=shape).astype(np.float32) * 10 for shape in SHAPES]


def rounded_sums(members, name, make=arrays_of):
    """Every member's sums, and the bytes that each sent."""
    sent = [0] * members

    def work(rank, send, receive):
        def counting(array):
            sent[rank] += array.nbytes
            send(array)

        inputs = [array.reshape(-1) for array in make(rank)]
        before = [array.copy() for array in inputs]
        outputs = [np.full_like(array, 7) for array in inputs]
        wire = RoundedWire(wire_type(name), counting, receive)
        ends = Ends(wire.send, wire.receive, wire.pass_on)
        ring_sum(inputs, outputs, rank, members, ends)
        for array, unchanged in zip(inputs, before, strict=True):
            np.testing.assert_array_equal(array, unchanged)
        return outputs

    return on_threads(members, work), sent


def check_within_bound(results, members, name):
    parts = [
        [a.reshape(-1).astype(float) for a in arrays_of(r)] for r in range(members)
    ]
    round_off = ROUND_OFF[name]
    visible = 0.0
    for place in range(len(SHAPES)):
        everybody = [arrays[place] for arrays in parts]
        # Partial sums are rounded on each of members - 1 hops, the result once; float32
        # adds members - 1 roundings of 2^-24. One number's share is up to 1 / members
        # of the sum of magnitudes, ten times the bound with bfloat16 and 5 members.
        factor = (1 + round_off) ** members * (1 + 2**-24) ** (members - 1) - 1
        bound = factor * sum(map(np.abs, everybody))
        for result in results:
            error = np.abs(result[place].reshape(-1).astype(float) - sum(everybody))
            assert (error <= bound).all()
            np.testing.assert_array_equal(result[place], results[0][place])
            visible = max([visible, *error])
    assert visible > 0.01 * round_off  # it was rounded indeed


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("members", [2, 3, 5])
def test_sums_lie_within_the_bound_and_are_equal_everywhere(members, name):
    results, sent = rounded_sums(members, name)
    check_within_bound(results, members, name)
    elements = sum(int(np.prod(shape)) for shape in SHAPES)
    # 2 n (N - 1) / N, with n of two bytes an element.
    assert sum(sent) == 2 * (members - 1) * 2 * elements


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_over_sockets_too(name):
    def work(link):
        return link.sum(arrays_of(link.rank), "numbers", wire_dtype=name)

    check_within_bound(on_workers(3, work), 3, name)


def test_an_overflow_of_float16_is_an_infinity_everywhere():
    # 65504 is the largest; 40000 fits and its double does not; infinities stay, and
    # opposite ones are not a number.
    rows = [[70000.0, 40000.0, -np.inf, np.inf, 1.0], [0.0, 40000.0, 1.0, -np.inf, 2.0]]

    def make(rank):
        return [np.array(rows[rank] * 40, np.float32)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results, _ = rounded_sums(2, "float16", make)
    expected = np.array([np.inf, np.inf, -np.inf, np.nan, 3.0] * 40, np.float32)
    for (result,) in results:
        np.testing.assert_array_equal(result, expected)


def test_parts_cover_all_elements():
    for elements in (0, 1, 7, 64):
        for parts in (1, 2, 3, 5):
            edges = part_edges(elements, parts)
            assert edges[0] == 0 and edges[-1] == elements
            assert (np.diff(edges) >= 0).all() and len(edges) == parts + 1
