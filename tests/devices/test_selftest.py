"""`tfdp selftest`: what is right is found right, and what is wrong wrong."""

import functools
import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.fresh_python import run_python
from tfdp.errors import CollectiveError, ParityError
from tfdp.exchange.reducer import Reducer
from tfdp.tools.processes.children import ask_child
from tfdp.tools.selftest import memory, overhead, rates, training
from tfdp.tools.selftest.memory import build_large
from tfdp.tools.selftest.parts import Part
from tfdp.tools.selftest.training import check_sums, largest_number

WORKER = "tfdp.tools.selftest.worker"


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(training, "SHAPES", ((), (7, 3), (1_003,)))
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
    whole = Reducer._by_buckets

    def by_buckets(self, values, rank, *rest, **options):
        return change(whole(self, values, rank, *rest, **options), values, rank)

    monkeypatch.setattr(Reducer, "_by_buckets", by_buckets)


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
    compare = training.compare_and_report
    monkeypatch.setattr(
        training,
        "compare_and_report",
        lambda setting, diagnose: compare(setting, False),
    )
    with pytest.raises(ParityError):
        training.check_training(strategy_of(2), False)


def test_one_replica_is_held_against_plain_keras_in_half_precision(monkeypatch):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        said = training.check_training(strategy_of(1), False)
        assert said == "3 steps as in plain Keras: 8 variables"
        # One that computes otherwise under the strategy is found.
        built = training._build
        monkeypatch.setattr(training, "_build", functools.partial(twice, built))
        with pytest.raises(ParityError):
            training.check_training(strategy_of(1), False)
    finally:
        keras.config.set_dtype_policy(before)


def twice(build, jit_compile):
    model = build(jit_compile)
    if tf.distribute.has_strategy():
        model.optimizer.learning_rate = 2 * float(model.optimizer.learning_rate)
    return model


def test_overhead_is_told(monkeypatch):
    monkeypatch.setattr(overhead, "REPEATS", 2)
    monkeypatch.setattr(overhead, "STEPS", {"CPU": (3, 3)})
    said = overhead.measure_overhead(strategy_of(1))
    words = r"{} \d+\.\d+ and \d+\.\d+ ms a step \(\d+\.\d+ of plain Keras\)"
    assert re.fullmatch(", ".join(words.format(n) for n in ("small", "large")), said)


def test_memory_is_told(monkeypatch):
    monkeypatch.setattr(memory, "ROWS", 2)
    monkeypatch.setattr(memory, "build_large", lambda kind: build_large("CPU"))
    config = tf.config.experimental
    monkeypatch.setattr(config, "reset_memory_stats", lambda name: None)
    monkeypatch.setattr(config, "get_memory_info", lambda name: {"peak": 5_000_000})
    said = memory.measure_memory(strategy_of(1))
    assert re.fullmatch(r"peak 5\.0 MB, planned \d+\.\d MB", said), said


def test_rates_are_told(small):
    said = rates.measure_rates(strategy_of(2))
    assert said.startswith("1 MiB ") and said.endswith(" GB/s)")


@pytest.mark.worth_seconds(16)
@pytest.mark.parametrize(
    "more, said",
    [
        ({"strategy": {"shard": "optimizer"}}, "3 steps as on one device"),
        ({"one_replica": True, "policy": "mixed_float16"}, "3 steps as in plain Keras"),
    ],
)
def test_a_part_runs_in_its_process(more, said):
    part = {"title": "t", "kind": "training", **more}
    asked = {"part": part, "device_type": "cpu", "devices": 2}
    found = ask_child(WORKER, asked, 300)
    assert found["state"] == "right" and found["said"].startswith(said)
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
