"""Slow workers: predictions against formulas of cases that have one."""

import math

import pytest

from tests.pure.test_simulate_command import H100, RATE
from tfdp.errors import ConfigurationError
from tfdp.tools.commands import cli
from tfdp.tools.simulator.waiting import (
    STEPS,
    Delays,
    WaitingWorkers,
    asynchronous,
    balanced,
    compare_policies,
    first_ones,
    late_sums,
)

STEP, EXCHANGE = 0.1, 0.01


def harmonic(count):
    return sum(1 / i for i in range(1, count + 1))


def cluster(workers=4, exchange=EXCHANGE, **delays):
    return WaitingWorkers(workers, STEP, exchange, Delays(**delays))


def test_without_delays_late_sums_hide_the_exchange():
    assert late_sums(cluster(), "").update_seconds == pytest.approx(STEP + EXCHANGE)
    # The last sum is waited for.
    late = late_sums(cluster(), "", 1)
    assert late.update_seconds == pytest.approx(STEP, rel=1 / STEPS)
    assert late.staleness == pytest.approx(1, rel=1 / STEPS)


def test_a_slow_worker_costs_what_formulas_say():
    slow = cluster(slow_factor=3)
    assert late_sums(slow, "").update_seconds == pytest.approx(3 * STEP + EXCHANGE)
    # All end together: 4 / (1 / 3 + 3) of a step each.
    even = 4 / (3 + 1 / 3) * STEP + EXCHANGE
    assert balanced(slow, "").update_seconds == pytest.approx(even)
    # Each worker pushes once per own step and exchange.
    rate = 3 / (STEP + EXCHANGE) + 1 / (3 * STEP + EXCHANGE)
    found = asynchronous(slow, "")
    assert found.update_seconds == pytest.approx(1 / rate, rel=4 / STEPS)
    # A version is older by the pushes of all others in between: workers - 1 on average.
    assert found.staleness == pytest.approx(3, rel=4 / STEPS)
    # The others end rounds without it; of its own rounds some are late.
    first = first_ones(slow, "", spare=1)
    assert first.update_seconds == pytest.approx(STEP + EXCHANGE)
    assert 0 < first.dropped <= 1 / 9


@pytest.mark.parametrize("workers", [4, 16])
def test_a_tail_costs_what_order_statistics_say(workers):
    mean = STEP / 10
    tail = cluster(workers, exchange=0.0, tail_seconds=mean)
    # The largest of n exponential times: mean H_n, variance below 1.65 mean^2. The
    # bound is four standard errors of the mean of all steps.
    error = 4 * math.sqrt(1.65 / STEPS) * mean
    expected = STEP + mean * harmonic(workers)
    found = late_sums(tail, "").update_seconds
    assert found == pytest.approx(expected, abs=error)
    # Late workers are not stopped, so they may be late again: measured, up to 4%.
    formula = STEP + mean * (harmonic(workers) - 1)
    spare = first_ones(tail, "", spare=1).update_seconds
    assert formula - error < spare < 1.04 * formula + error


def test_without_spare_workers_steps_are_synchronous():
    delays = {"tail_seconds": 0.05, "pause_seconds": 1, "pause_every_seconds": 20}
    slow = cluster(**delays)
    assert first_ones(slow, "", spare=0) == late_sums(slow, "")


def test_pauses_take_their_share_of_one_worker():
    paused = cluster(exchange=0.0, pause_seconds=1, pause_every_seconds=9)
    found = asynchronous(paused, "").efficiency
    # One second of ten. Pauses in the time that is simulated are a Poisson number of
    # about 22 per worker, 88 of all: four standard deviations are 4 / sqrt(88).
    assert 1 - found == pytest.approx(0.1, rel=4 / math.sqrt(88))


def test_the_table_of_policies(capsys):
    one = ["simulate", *H100, *RATE, "--devices", "64"]
    assert cli.main([*one, "--slow-factor", "3"]) == 0
    said = capsys.readouterr().out
    for found in compare_policies(cluster(8)):
        assert f"\n{found.policy} " in said
    assert "on 8 workers" in said


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        (["--devices", "64", "--pause-seconds", "1"], "give both"),
        (["--devices", "64", "--slow-factor", "0"], "slow_factor"),
        (["--slow-factor", "3"], "one --devices"),
        (["--devices", "8", "--slow-factor", "3"], "workers"),
    ],
)
def test_options_that_cannot_act(extra, what, capsys):
    assert cli.main(["simulate", *H100, *RATE, *extra]) == 2
    assert what in capsys.readouterr().err


def test_a_cluster_of_one_worker_waits_for_none():
    with pytest.raises(ConfigurationError, match="workers"):
        WaitingWorkers(1, STEP, EXCHANGE)
