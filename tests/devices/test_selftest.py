"""`tfdp selftest`: what is right is found right, and what is wrong wrong."""

import functools
import json

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.fresh_python import run_python
from tfdp.bench.worker_process import run_worker
from tfdp.errors import CollectiveError, ParityError
from tfdp.exchange.pipeline import GradientPipeline
from tfdp.selftest import rates, sums, training
from tfdp.selftest.parts import Part
from tfdp.selftest.sums import check_sums, largest_number

WORKER = "tfdp.selftest.worker"


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(sums, "SHAPES", ((), (7, 3), (1_003,)))
    monkeypatch.setattr(rates, "SIZES_BYTES", (1 << 20,))


def strategy_of(replicas, **options):
    devices = [f"CPU:{rank}" for rank in range(replicas)]
    return tfdp.DataParallelStrategy(devices, **options)


@pytest.mark.parametrize("replicas", [2, 3, 5, 64, 300])
def test_no_sum_of_the_numbers_is_rounded(replicas):
    largest = largest_number(replicas)
    assert largest >= 1
    if replicas <= 256:
        whole = tf.range(largest * replicas + 1)
        there_and_back = tf.cast(tf.cast(whole, tf.bfloat16), tf.int32)
        np.testing.assert_array_equal(there_and_back, whole)


@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
def test_sums_are_right(small, engine):
    communication = tfdp.Communication(engine=engine)
    said = check_sums(strategy_of(3, communication=communication))
    assert said.startswith("3 times 15 tensors")


def changed_sums(monkeypatch, change):
    """The sums that every replica gets go through `change(sums, own, rank)`."""
    whole = GradientPipeline._by_buckets

    def by_buckets(self, values, rank, *rest, **options):
        return change(whole(self, values, rank, *rest, **options), values, rank)

    monkeypatch.setattr(GradientPipeline, "_by_buckets", by_buckets)


def test_one_wrong_number_is_found(small, monkeypatch):
    def off_by_one(found, own, rank):
        if rank == 1:
            found[2] += tf.one_hot(7, found[2].shape[0], dtype=found[2].dtype)
        return found

    changed_sums(monkeypatch, off_by_one)
    words = r"float32 \[1003\] is wrong on replica 1, in call 1: 1 of 1003"
    with pytest.raises(CollectiveError, match=words):
        check_sums(strategy_of(2))


def test_training_is_right():
    said = training.check_training(strategy_of(3, shard="parameters"), False)
    assert said == "3 steps as on one device: 8 variables"


def test_a_replica_that_hears_nothing_is_found(monkeypatch):
    def own_on_the_last(found, own, rank):
        return [2.0 * each for each in own] if rank == 1 else found

    changed_sums(monkeypatch, own_on_the_last)
    # Looking for the causes takes most of the time, and has its own tests.
    quick = functools.partial(training.check_parity, diagnose=False)
    monkeypatch.setattr(training, "check_parity", quick)
    with pytest.raises(ParityError):
        training.check_training(strategy_of(2), False)


def test_rates_are_told(small):
    said = rates.measure_rates(strategy_of(2))
    assert said.startswith("1 MiB ") and said.endswith(" GB/s)")


@pytest.mark.worth_seconds(10)
def test_a_part_runs_in_its_process():
    part = {"title": "t", "kind": "training", "strategy": {"shard": "optimizer"}}
    asked = {"part": part, "device_type": "cpu", "devices": 2}
    found = run_worker(WORKER, asked, 300)
    assert found["state"] == "right" and found["said"].startswith("3 steps")
    assert Part(**part).kind == "training"


@pytest.mark.slow
def test_the_command_as_a_user_runs_it(tmp_path):
    path = tmp_path / "report.json"
    arguments = ["--devices", "4", "--device-type", "cpu", "--json", str(path)]
    done = run_python("-m", "tfdp", "selftest", *arguments, timeout_seconds=900)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(path.read_text("utf-8"))["parts"]
    assert {part["state"] for part in parts} == {"right"}
    assert f"all {len(parts)} right" in done.stdout
