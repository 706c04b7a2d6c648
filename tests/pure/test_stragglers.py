"""Which worker is slow, and why, from made tables of steps."""

import random
import statistics

import pytest

from tfdp.plan.stragglers import (
    CAUSES,
    COLUMNS,
    INPUT,
    SENDING,
    STEP,
    WAITING,
    Scores,
    above_others,
    busy_seconds,
)

INPUT_SECONDS, COMPUTE_SECONDS, LINK_SECONDS = 0.002, 0.05, 0.004


def made(workers, slow, cause, more, *, steps=10, noise=0.1, seed=0):
    """Tables of synchronous steps: the others wait for the latest worker, and then for
    the slowest transfer. A send blocks while the next worker has not come yet."""
    draw = random.Random(f"{workers} {slow} {cause} {seed}")
    tables = []
    for _ in range(steps):
        parts = []
        for rank in range(workers):
            usual = [INPUT_SECONDS, COMPUTE_SECONDS, LINK_SECONDS]
            part = [one * draw.uniform(1, 1 + noise) for one in usual]
            if rank == slow:
                part[CAUSES.index(cause)] += more
            parts.append(part)
        own = [waited + computed for waited, computed, _ in parts]
        step = max(own) + max(link for *_, link in parts)
        table = []
        for rank, (waited, computed, link) in enumerate(parts):
            blocked = max(0.0, own[(rank + 1) % workers] - own[rank])
            row = [step, waited, computed, step - own[rank], blocked + link, link, 4.0]
            table.append(row)
        tables.append(table)
    return tables


@pytest.mark.parametrize("workers", [2, 3, 4, 8, 64])
def test_the_slow_worker_its_cause_and_its_cost_are_found(workers):
    for slow in {0, 1, workers - 1}:
        for cause in CAUSES:
            tables = made(workers, slow, cause, more=0.04)
            found = Scores(workers).slowest(9, tables)
            assert (found.step, found.worker, found.cause) == (9, slow, cause)
            # The noise adds a tenth of each part at most, here and to the others.
            assert found.lost_seconds == pytest.approx(0.04, abs=0.006)
            step = statistics.median(table[0][STEP] for table in tables)
            assert found.lost_share == pytest.approx(found.lost_seconds / step)
            assert 1.5 < found.to_best < 2 and found.to_own_best == 1
            assert f"worker {slow} is slow, mostly " in str(found)


def test_a_busy_processor_that_delays_input_more_is_the_cause():
    tables = made(3, 1, "input", more=0.06)
    for table in tables:
        table[1][STEP] += 0.03
        for row in (table[0], table[2]):
            row[STEP] += 0.03
            row[WAITING] += 0.03
    found = Scores(3).slowest(9, tables)
    assert (found.worker, found.cause) == (1, "compute")


def test_a_processor_that_is_taken_away_for_some_time_in_most_steps_is_found():
    late = [0.08, 0.0, 0.04, 0.04, 0.12, 0.0, 0.08, 0.04, 0.12, 0.08]
    tables = [made(2, 1, "compute", more, steps=1)[0] for more in late]
    found = Scores(2).slowest(9, tables)
    assert (found.worker, found.cause) == (1, "compute")


def test_equal_workers_and_chance_are_no_stragglers():
    for seed in range(50):
        assert Scores(4).slowest(9, made(4, None, None, 0.0, seed=seed)) is None
    # In each step another one is late, by half of a step. One of 4 is late in 6 of 10
    # steps with a probability of 4 x 2%, and is named then.
    scores, named = Scores(4), 0
    for seed in range(100):
        draw = random.Random(seed)
        tables = [
            made(4, draw.randrange(4), "compute", 0.05, steps=1, seed=s)[0]
            for s in range(10)
        ]
        named += scores.slowest(9, tables) is not None
    assert named < 15


def test_a_worker_is_compared_with_its_own_best():
    scores = Scores(2)
    assert scores.slowest(9, made(2, None, None, 0.0, noise=0.0)) is None
    slower = scores.slowest(19, made(2, 1, "compute", 0.056, noise=0.0))
    # Twice its 56 ms of input, computation and link; the other is as before.
    assert slower.to_own_best == pytest.approx(2) == pytest.approx(slower.to_best)
    # All become slower: nobody waits, and so nobody is named.
    tables = made(2, None, None, 0.0, noise=0.0)
    for table in tables:
        for row in table:
            row[:] = [2 * one for one in row]
    assert scores.slowest(29, tables) is None


def test_a_send_that_blocks_for_a_late_peer_is_not_slow():
    row = [0.0] * len(COLUMNS)
    late, early = list(row), list(row)
    late[STEP] = early[STEP] = 1.0
    late[INPUT], early[WAITING], early[SENDING] = 0.5, 0.7, 0.8
    # The peer came 0.7 s later: 0.1 s of the send are left for the link.
    found = busy_seconds([late, early])
    assert found[0] == (0.5, 0.5, 0.0)
    assert found[1] == pytest.approx((0.0, 0.3, 0.1))


def test_above_others_is_the_distance_from_the_median_of_the_others():
    draw = random.Random(1)
    for workers in range(2, 9):
        values = [float(draw.randrange(5)) for _ in range(workers)]
        others = [values[:rank] + values[rank + 1 :] for rank in range(workers)]
        medians = map(statistics.median, others)
        expected = [
            value - median for value, median in zip(values, medians, strict=True)
        ]
        assert above_others(values) == expected
