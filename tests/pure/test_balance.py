"""Shares of a batch by the hosts' speed: the function, and the decisions over steps."""

import itertools

import numpy as np
import pytest

from tfdp.plan.balance import (
    FEWEST_STEPS,
    LEAST_OF_EQUAL_SHARE,
    MOST_STEPS,
    PARTS_OF_EQUAL_SHARE,
    STALE_STEPS,
    SpeedBalance,
    parts_of_batch_of,
    shares_by_speed,
)


def step_seconds(shares, seconds_of_row, fixed=0.0):
    whole = sum(shares)
    pairs = zip(shares, seconds_of_row, strict=True)
    return [fixed + share / whole * seconds for share, seconds in pairs]


@pytest.mark.parametrize("seed", range(4))
def test_no_other_shares_have_a_shorter_step(seed):
    rng = np.random.default_rng(seed)
    slowness, parts = rng.uniform(0.2, 4.0, 3).tolist(), 16
    found = shares_by_speed([1, 1, 1], step_seconds([1, 1, 1], slowness), parts)
    others = [
        (a, b, parts - a - b)
        for a, b in itertools.product(range(1, parts), repeat=2)
        if a + b < parts
    ]
    # Rounding of a few quotients, each by 2^-53.
    best = min(max(step_seconds(other, slowness)) for other in others)
    assert sum(found) == (parts if found != (1, 1, 1) else 3)
    assert max(step_seconds(found, slowness)) <= best * (1 + 1e-12) / 0.95


@pytest.mark.parametrize("hosts, ideal", [(4, 2.5), (2, 2.0)])
def test_a_host_of_a_third_of_the_speed(hosts, ideal):
    slowness = [1.0] * (hosts - 1) + [3.0]
    before = step_seconds([1] * hosts, slowness)
    found = shares_by_speed([1] * hosts, before, parts_of_batch_of(256, hosts, 1))
    gain = max(before) / max(step_seconds(found, slowness))
    # A part is 1/32 of an equal share, so a host's time is off by one such part.
    assert ideal >= gain > ideal * (1 - 3 / 32)


def test_the_slowest_keeps_a_least_share():
    found = shares_by_speed([1, 1], [1000.0, 1.0], 64)
    assert found == (64 // (2 * LEAST_OF_EQUAL_SHARE), 62)
    assert shares_by_speed([1] * 4, [1000.0, 1.0, 1.0, 1.0], 4) == (1, 1, 1, 1)


def test_small_gains_change_nothing():
    assert shares_by_speed([1, 1, 1], [1.04, 1.0, 1.0], 96) == (1, 1, 1)
    assert shares_by_speed([40, 24], [1.0, 1.0], 64) == (40, 24)


@pytest.mark.parametrize("rows", [1, 3, 7, 32, 250, 256, 100_000])
@pytest.mark.parametrize("hosts, replicas", [(2, 1), (4, 2), (3, 8)])
def test_parts_are_few_and_one_for_each_host(rows, hosts, replicas):
    parts = parts_of_batch_of(rows, hosts, replicas)
    assert hosts <= parts <= PARTS_OF_EQUAL_SHARE * hosts
    if rows % parts == 0 and parts > hosts:
        assert rows // parts % replicas == 0


def train(balance, slowness, steps, fixed=0.0, rows=256):
    """The steps after which the shares changed."""
    changes = []
    for step in range(steps):
        if balance.note(step_seconds(balance.shares, slowness, fixed), rows):
            changes.append(step)
    return changes


@pytest.mark.parametrize("fixed", [0.0, 0.5])
def test_shares_settle_and_follow_a_change_of_speed(fixed):
    """A part of the time that is the same for all shares needs some more changes."""
    balance = SpeedBalance(4, 1)
    changes = train(balance, [1.0, 1.0, 1.0, 3.0], 2000, fixed)
    assert changes[0] == STALE_STEPS + FEWEST_STEPS - 1
    assert len(changes) <= (1 if fixed == 0 else 6)
    times = step_seconds(balance.shares, [1.0, 1.0, 1.0, 3.0], fixed)
    assert max(times) <= 1.1 * min(times)
    train(balance, [3.0, 1.0, 1.0, 1.0], 4 * MOST_STEPS, fixed)
    assert balance.shares[0] == min(balance.shares)


def test_a_pause_and_steps_without_measurement_change_nothing():
    balance = SpeedBalance(2, 1)
    for step in range(10 * FEWEST_STEPS):
        times = [9.0, 1.0] if step % FEWEST_STEPS == 0 else [1.0, 1.0]
        assert not balance.note(times, 64)
        assert not balance.note([0.0, 5.0], 64)
        assert not balance.note([float("nan"), 5.0], 64)
    assert balance.shares == (1, 1)


def test_hosts_that_note_the_same_decide_the_same():
    rng = np.random.default_rng(0)
    one, other = SpeedBalance(3, 2), SpeedBalance(3, 2)
    for _ in range(400):
        times = rng.exponential(1.0, 3).tolist()
        assert one.note(times, 96) == other.note(times, 96)
        assert one.shares == other.shares
