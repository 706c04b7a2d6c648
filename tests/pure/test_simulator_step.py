"""Steps played through and their parts, against values computed by hand."""

import dataclasses
import doctest
import math
import time

import pytest

from tests.support.dense_profile import dense_network
from tfdp.errors import ConfigurationError
from tfdp.plan.topology import Topology
from tfdp.tools.simulator import failures, model, scaling, step
from tfdp.tools.simulator.failures import (
    Jitter,
    Reliability,
    best_interval_seconds,
    expected_maximum,
)
from tfdp.tools.simulator.known import HARDWARE, MODELS
from tfdp.tools.simulator.machine import Link, Machine
from tfdp.tools.simulator.model import Compute, GradientSize, ModelProfile
from tfdp.tools.simulator.scaling import device_counts, scaling_curve
from tfdp.tools.simulator.step import (
    PARTS,
    InputRate,
    Training,
    predict_step,
    simulate_step,
)
from tfdp.tools.simulator.sums import ExchangePart

# Each host one device; 1e5 bytes/s, and next to nothing besides.
LINE = Machine(
    "line",
    1,
    Link(1e-9, 1e5),
    Link(1e-9, 1e5),
    flops_per_second=1.0,
    launch_seconds=1e-9,
)
# 3 layers of 1e5, 2e5 and 1e5 bytes; backprop takes 1, 2 and 1 s of 4.
THREE = ModelProfile(
    "three",
    (
        GradientSize(100_000, 1.0),
        GradientSize(200_000, 2.0),
        GradientSize(100_000, 1.0),
    ),
)
SECONDS = Compute(forward_seconds=2.0, backward_seconds=4.0)
TRAINING = Training(THREE, SECONDS, LINE, bucket_bytes=1, first_bucket_bytes=1)


def test_gradients_come_as_backprop_goes():
    assert model.ready_seconds(THREE, SECONDS) == [6.0, 5.0, 3.0]


def test_buckets_travel_in_turn_and_the_rest_shows():
    # On 2 hosts a bucket of n bytes takes n / 1e5 s. Ready at 3, 5 and 6; the second
    # one travels from 5 to 7, the last one from 7 to 8.
    found = step.simulate_exchange(TRAINING, Topology(2, 1))
    assert found == pytest.approx(8.0)
    assert predict_step(TRAINING, 2).part_seconds["communication"] == pytest.approx(2.0)
    assert predict_step(TRAINING, 2).efficiency == pytest.approx(6 / 8)


def test_without_overlap_all_of_it_shows():
    waiting = dataclasses.replace(TRAINING, overlap=False)
    assert predict_step(waiting, 2).part_seconds["communication"] == pytest.approx(4.0)


def test_sums_that_take_half_of_the_computing_slow_backprop_down():
    link = dataclasses.replace(LINE.between_hosts, compute_share=0.5)
    machine = dataclasses.replace(LINE, between_hosts=link)
    training = dataclasses.replace(TRAINING, machine=machine)
    found = step.simulate_exchange(training, Topology(2, 1))
    # From 3 to 4 the first sum: 0.5 s of the 2 s to the second gradient are done, which
    # is there at 5.5; its sum until 7.5, meanwhile the last layer's 1 s is done; at 7.5
    # the last sum, until 8.5.
    assert found == pytest.approx(8.5)


def test_what_takes_all_of_the_computing_is_added_up():
    once = [ExchangePart("within", 2.0, 1.0)]
    found = simulate_step(6.0, [3.0, 5.0, 6.0], [once, once, once])
    assert found == pytest.approx(12.0)


def test_levels_work_at_the_same_time():
    both = [ExchangePart("within", 1.0, 0.0), ExchangePart("between", 3.0, 0.0)]
    # Within 0 to 1 and 1 to 2, between 1 to 4 and 4 to 7.
    assert simulate_step(0.5, [0.0, 0.0], [both, both]) == pytest.approx(7.0)


def test_levels_that_need_the_same_cores_take_turns():
    both = [ExchangePart("within", 1.0, 0.6), ExchangePart("between", 3.0, 0.6)]
    # Within 0 to 1, and 1 to 2 by who has waited longer; between 2 to 5 and 5 to 8.
    assert simulate_step(0.1, [0.0, 0.0], [both, both]) == pytest.approx(8.0)
    half = [ExchangePart("within", 1.0, 0.5), ExchangePart("between", 3.0, 0.5)]
    assert simulate_step(0.1, [0.0, 0.0], [half, half]) == pytest.approx(7.0)


def test_no_bucket_and_no_stage_are_a_step_without_sums():
    assert simulate_step(2.0, [], []) == 2.0
    assert simulate_step(2.0, [1.0], [[]]) == 2.0


def test_parts_add_up_and_input_comes_last():
    training = dataclasses.replace(
        TRAINING,
        jitter=Jitter(0.1),
        input_rate=InputRate(per_host=0.05),
        sharing=((1, 1.5),),
        reliability=Reliability(1000.0, restart_seconds=60.0),
    )
    found = predict_step(training, 2)
    parts = found.part_seconds
    assert tuple(parts) == PARTS
    assert found.step_seconds == pytest.approx(sum(parts.values()))
    assert parts["compute"] == 6.0 and parts["sharing cores"] == pytest.approx(3.0)
    # The expected maximum of two normal numbers is 1 / sqrt(pi).
    assert parts["waiting"] == pytest.approx(9 * 0.1 / math.sqrt(math.pi), rel=1e-6)
    # A sample in 20 s on each host: a step of one sample takes 20 s before failures.
    before = sum(parts[part] for part in PARTS[:5])
    assert before == pytest.approx(20.0)
    assert parts["checkpoints"] > 0 and parts["failures"] > 0
    shares = scaling.lost_shares(found)
    assert sum(shares.values()) == pytest.approx(1.0)


def test_one_device_loses_nothing():
    found = predict_step(dataclasses.replace(TRAINING, jitter=Jitter(0.1)), 1)
    assert found.efficiency == pytest.approx(1.0)
    assert found.largest_loss == "none" or found.part_seconds[found.largest_loss] < 1e-9


def test_a_price_counts_devices_and_seconds():
    training = dataclasses.replace(TRAINING, price_per_device_hour=9.0)
    found = predict_step(training, 2)
    # 8 s of 2 devices at 9 an hour are 0.04, for 2 samples.
    assert found.price_per_million_samples == pytest.approx(0.02e6)


def test_the_expected_maximum_is_that_of_the_tables():
    # Tippett (1925), as in David and Nagaraja, table of normal order statistics.
    table = {
        2: 0.56419,
        3: 0.84628,
        5: 1.16296,
        10: 1.53875,
        100: 2.50759,
        1000: 3.24144,
    }
    found = {count: expected_maximum(count) for count in table}
    assert found == pytest.approx(table, abs=6e-6)


@pytest.mark.parametrize("pause, between", [(1.0, 1e4), (30.0, 1e4), (600.0, 1e4)])
def test_no_interval_loses_less_than_the_best(pause, between):
    def lost(interval):
        hours = between / 3600
        found = Reliability(hours, 10.0, pause, interval).lost(1)
        return found.checkpoints + found.failures

    # The best within a thousand steps of a tenth of a per cent, each way.
    best = best_interval_seconds(pause, between)
    numerically = min(
        (best * 1.001**power for power in range(-1000, 1001)),
        key=lambda each: lost(each),
    )
    # Daly's series ends with the third term: off by its next one.
    assert lost(best) <= lost(numerically) * (1 + pause / between)


def test_twice_the_devices_fail_twice_as_often():
    one = Reliability(1000.0, checkpoint_pause_seconds=1.0)
    # sqrt(2 d M): a quarter of the time between failures, half of the interval.
    ratio = one.lost(100).interval_seconds / one.lost(400).interval_seconds
    assert ratio == pytest.approx(2.0, rel=0.01)
    assert one.lost(1 << 24).failures > 100


def test_a_cluster_that_always_fails_trains_nothing():
    training = dataclasses.replace(TRAINING, reliability=Reliability(1e-6))
    found = predict_step(training, 64)
    assert math.isinf(found.step_seconds) and found.efficiency == 0.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Link(math.nan, 1.0),
        lambda: Link(1.0, 0.0),
        lambda: Link(1.0, -1.0),
        lambda: Link(1.0, math.inf),
        lambda: Link(1.0, 10**400),
        lambda: Link(1.0, 5e-324),
        lambda: Link(1.0, "fast"),
        lambda: Link(1.0, 1.0, reached=1.5),
        lambda: Link(1.0, 1.0, connections=0),
        lambda: Machine("m", 0, LINE.within_host, LINE.within_host),
        lambda: Machine("m", 1, LINE.within_host, LINE.within_host, math.nan),
        lambda: GradientSize(-1, 1.0),
        lambda: GradientSize(8, 1.0, "float32", 4, True, 3),
        lambda: GradientSize(1, math.nan),
        lambda: ModelProfile("m", ()),
        lambda: Compute(0.0, 1.0),
        lambda: Compute(1.0, 1.0, samples=0),
        lambda: Compute.from_flops(THREE, 1, 1e12),
        lambda: Jitter(-0.1),
        lambda: Reliability(0.0),
        lambda: Reliability(1.0, checkpoint_interval_seconds=0.0),
        lambda: InputRate(per_host=0.0),
        lambda: Training(THREE, SECONDS, LINE, algorithm="star"),
        lambda: Training(THREE, SECONDS, LINE, bucket_bytes=0),
        lambda: Training(THREE, SECONDS, LINE, sharing=((0, 1.0),)),
        lambda: Training(THREE, SECONDS, LINE, price_per_device_hour=math.nan),
        lambda: predict_step(TRAINING, 0),
        lambda: predict_step(TRAINING, 1 << 30),
        lambda: predict_step(
            dataclasses.replace(TRAINING, machine=HARDWARE["p100-25gbit"]), 6
        ),
        lambda: scaling_curve(TRAINING, []),
        lambda: scaling_curve(TRAINING, range(1, 2000)),
        lambda: device_counts(0, 4, 1),
    ],
)
def test_what_means_nothing_is_refused_with_what_came(make):
    with pytest.raises(ConfigurationError) as refused:
        make()
    assert len(str(refused.value)) < 400


def test_flops_of_forward_are_a_third():
    found = Compute.from_flops(dense_network("d", (10, 5)), 4, 100.0)
    assert found == Compute(4.0, 8.0, 0.0, 4)


def test_gathered_weights_cost_half_as_much_again():
    training = dataclasses.replace(TRAINING, gather_parts=True)
    plain, parts = predict_step(TRAINING, 2), predict_step(training, 2)
    assert parts.sum_seconds == pytest.approx(1.5 * plain.sum_seconds)
    # Forward waits for the first layer's weights: half a sum of 1e5 bytes, 0.5 s.
    assert parts.step_seconds == pytest.approx(plain.step_seconds + 0.5)


def test_16384_devices_within_5_seconds():
    training = Training(
        MODELS["llama-3-8b"](),
        Compute.from_seconds(2.8, samples=16384),
        HARDWARE["h100-8x400gbit"],
        jitter=Jitter(0.03),
        reliability=Reliability(50_000.0),
    )
    start = time.process_time()
    curve = scaling_curve(training, device_counts(1, 16384, 8))
    # Some 50 ms of processor time; the bound is a hundred times of that.
    assert time.process_time() - start < 5.0
    assert [each.devices for each in curve] == [2**power for power in range(15)]
    rates = [each.samples_per_second for each in curve]
    assert rates == sorted(rates)


@pytest.mark.parametrize("module", [failures, model, scaling, step, failures])
def test_examples(module):
    assert doctest.testmod(module).failed == 0
