"""The rule by which a sum between hosts takes its way."""

import doctest
import math

import pytest

from tfdp.cluster import worker_names
from tfdp.hosts import recursive_doubling
from tfdp.plan import sum_ways
from tfdp.plan.sum_ways import (
    MOST_BYTES_GATHERED_OF_ALL,
    MOST_DOUBLED_BYTES,
    WAYS,
    LinkSpeed,
    SumWays,
    distances,
    rounds,
    sent_bytes,
)

GIGABIT = LinkSpeed(latency_seconds=1e-4, bytes_per_second=1.2e8)
# As measured: 64 workers on two cores wait for each other.
CROWDED = LinkSpeed(latency_seconds=2e-3, bytes_per_second=1.5e7)
SPEEDS = [GIGABIT, CROWDED, LinkSpeed(1e-7, 1e10), LinkSpeed(0.2, 1e5)]


@pytest.mark.parametrize("workers", [*range(2, 70), 255, 256, 257, 1000])
def test_few_rounds_for_any_number_of_workers(workers):
    doublings = math.ceil(math.log2(workers))
    assert len(distances(workers)) == doublings
    assert rounds("gather", workers) == doublings
    assert rounds("doubling", workers) == 2 * doublings
    assert rounds("ring", workers) == 2 * (workers - 1)


@pytest.mark.parametrize("workers", [2, 3, 8, 100])
def test_a_ring_sends_least(workers):
    sent = {way: sent_bytes(way, 1000 * workers, workers) for way in WAYS}
    assert sent["ring"] == 2000 * (workers - 1) == min(sent.values())
    assert sent["doubling"] <= sent["ring"] * (1 + rounds("gather", workers)) / 2


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("workers", [2, 3, 4, 16, 64, 256])
def test_longer_sums_take_more_rounds_of_fewer_bytes(workers, speed):
    ways = SumWays(workers, speed)
    chosen = [ways.choose(size) for size in (2**bits for bits in range(31))]
    order = ["gather", "doubling", "ring"]
    assert [order.index(way) for way in chosen] == sorted(map(order.index, chosen))
    assert chosen[0] == "gather" and chosen[-1] == "ring"


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("workers", [2, 3, 4, 16, 64, 256])
def test_what_others_bring_takes_a_bounded_memory(workers, speed):
    ways = SumWays(workers, speed)
    for size in (2**bits + odd for bits in range(31) for odd in (-1, 0, 1)):
        way = ways.choose(size)
        assert way != "gather" or size * workers <= MOST_BYTES_GATHERED_OF_ALL
        assert way != "doubling" or size <= MOST_DOUBLED_BYTES


def test_it_is_the_fastest_by_the_formula():
    ways = SumWays(16, GIGABIT)
    # 30 rounds of 0.1 ms, and 2 x 15 / 16 x 100 kB at 120 MB/s.
    assert ways.seconds("ring", 100_000) == pytest.approx(3e-3 + 187_500 / 1.2e8)
    # 8 rounds; (32 + 15) / 16 x 100 kB, three times.
    expected = 8e-4 + 3 * 293_750 / 1.2e8
    assert ways.seconds("doubling", 100_000) == pytest.approx(expected)
    assert ways.choose(20_000) == "doubling"
    assert ways.choose(100_000) == "ring"
    assert SumWays(64, CROWDED).choose(100_000) == "doubling"


def test_the_speed_of_all_is_the_middle_whatever_the_order():
    measured = [LinkSpeed(rank + 1.0, 10.0 - rank) for rank in range(4)]
    assert LinkSpeed.middle_of(measured) == LinkSpeed(2.0, 8.0)
    assert LinkSpeed.middle_of(measured[::-1]) == LinkSpeed(2.0, 8.0)


def test_the_examples_say_what_comes():
    for module in (recursive_doubling, recursive_doubling, sum_ways, worker_names):
        assert doctest.testmod(module).failed == 0
