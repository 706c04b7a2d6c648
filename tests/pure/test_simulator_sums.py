"""What the simulator says of sums, against values computed by hand."""

import doctest

import pytest

from tfdp.errors import ConfigurationError
from tfdp.plan.sum_ways import LinkSpeed, SumWays
from tfdp.plan.topology import Topology
from tfdp.tools.simulator import machine, published, step, sums
from tfdp.tools.simulator.machine import Link, Machine
from tfdp.tools.simulator.sums import ALGORITHMS, exchange_stages

# 10 bytes/s and 1 s within a host, 5 bytes/s (2 cards of 5, half reached) and 3 s
# between hosts; next to nothing to launch.
MACHINE = Machine(
    "slow",
    4,
    Link(1.0, 10.0),
    Link(3.0, 5.0, connections=2, reached=0.5),
    launch_seconds=1e-12,
)
HOST, HOSTS = Topology(1, 4), Topology(4, 2)


def sum_seconds(*arguments):
    return sum(stage.seconds for stage in exchange_stages(*arguments))


@pytest.mark.parametrize(
    "algorithm, topology, expected",
    [
        # 2 x 3 hops of 1 s; 2 x 100 x 3/4 bytes at 10 bytes/s.
        ("ring", HOST, 6 + 15),
        ("two_level", HOST, 6 + 15),
        ("tree", HOST, 6 + 10),
        # 4 x 100 bytes read and 100 written at 10 bytes/s, and a latency each.
        ("in_process", HOST, 50 + 4),
        ("sockets", HOST, 50 + 4),
        # 14 hops, 6 of them between hosts; 2 x 100 x 7/8 bytes at 5 bytes/s.
        ("ring", HOSTS, 8 * 1 + 6 * 3 + 35),
        # Within: 2 hops, 2 x 100 / 2 bytes; between: 6 hops, 2 x 100 x 3/4 bytes.
        ("two_level", HOSTS, 2 + 10 + 18 + 30),
        ("halving_doubling", HOSTS, 2 + 10 + 4 * 3 + 30),
        ("recursive_doubling", HOSTS, 2 + 10 + 2 * (3 + 20)),
        ("tree", HOSTS, 2 + 4 * 3 + 40),
    ],
)
def test_a_sum_of_100_bytes(algorithm, topology, expected):
    assert sum_seconds(100, topology, MACHINE, algorithm) == pytest.approx(expected)


def test_in_process_each_tensor_has_its_latency():
    (stage,) = exchange_stages(100, HOST, MACHINE, "in_process", 1.0, 7)
    assert stage.seconds == pytest.approx(50 + 7 * 4)
    (stage,) = exchange_stages(100, HOST, MACHINE, "ring", 1.0, 7)
    assert stage.seconds == pytest.approx(6 + 15)


def test_six_hosts_are_four_and_two_that_hand_theirs_over():
    # 4 steps of 3 s, 150 bytes; before and after 3 s and 100 bytes each.
    expected = 4 * 3 + 30 + 2 * (3 + 20)
    found = sum_seconds(100, Topology(6, 1), MACHINE, "halving_doubling")
    assert found == pytest.approx(expected)
    found = sum_seconds(100, Topology(6, 1), MACHINE, "recursive_doubling")
    assert found == pytest.approx(2 * (3 + 20) + 2 * (3 + 20))


@pytest.mark.parametrize("size_bytes", [8, 40_000, 10**8])
def test_sockets_take_the_way_that_the_link_would_choose(size_bytes):
    link = Link(1e-4, 1.2e8)
    machine = Machine("m", 1, link, link, launch_seconds=1e-12)
    ways = SumWays(16, LinkSpeed(1e-4, 1.2e8))
    expected = ways.seconds(ways.choose(size_bytes), size_bytes)
    found = sum_seconds(size_bytes, Topology(16, 1), machine, "sockets")
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_replica_sends_nothing(algorithm):
    assert exchange_stages(100, Topology(), MACHINE, algorithm) == []


def test_a_gather_is_half_a_sum():
    whole = sum_seconds(100, HOSTS, MACHINE, "ring")
    half = exchange_stages(100, HOSTS, MACHINE, "ring", part=0.5)
    assert sum(stage.seconds for stage in half) == pytest.approx(whole / 2)


def test_what_cannot_act_is_refused():
    with pytest.raises(ConfigurationError, match="adds on one host"):
        sum_seconds(1, HOSTS, MACHINE, "in_process")
    with pytest.raises(ConfigurationError, match="Received: 'star'"):
        sum_seconds(1, HOST, MACHINE, "star")


@pytest.mark.parametrize("module", [machine, published, step, sums])
def test_examples(module):
    assert doctest.testmod(module).failed == 0
