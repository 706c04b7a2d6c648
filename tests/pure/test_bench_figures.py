"""How benchmark figures are taken, summed up, stored and shown; no TensorFlow."""

import argparse
import dataclasses
import json
import os
import subprocess

import pytest

from benchmarks.bench.__main__ import add_arguments, run
from benchmarks.bench.cases import CASES, select_cases
from benchmarks.bench.gradient_sets import GRADIENT_SETS, count_parameters
from benchmarks.bench.models import MODELS
from benchmarks.bench.one_process.arms import ARMS
from benchmarks.bench.one_process.runner import Failure, Report
from benchmarks.bench.processes.arms import GROUP_ARMS
from benchmarks.bench.request import Request
from benchmarks.bench.results import (
    ArmResult,
    CaseResult,
    efficiency,
    relative_speed,
    spread,
)
from benchmarks.bench.tables import format_failure, format_heading, format_result
from tests.support.fresh_python import run_program
from tfdp.errors import ConfigurationError, DeviceError
from tfdp.files.checked_json import write_json
from tfdp.tools.measuring import two_hosts as two_hosts_module
from tfdp.tools.measuring.in_turn import time_in_turn


class Clock:
    """A clock that only moves when a call of an arm moves it."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def arm(self, name, seconds):
        def call():
            self.calls.append(name)
            self.now += seconds

        return call

    def __call__(self):
        return self.now


def test_arms_take_turns_and_each_starts_once():
    clock = Clock()
    arms = {name: clock.arm(name, 1.0) for name in "abc"}
    time_in_turn(arms, repeats=3, calls=1, clock=clock)
    # Two calls of each in turn, the first not timed; a repeat starts one arm later.
    assert "".join(clock.calls) == "aabbcc" + "bbccaa" + "ccaabb"


def test_seconds_are_per_call_and_leave_out_the_first():
    clock = Clock()
    arms = {"slow": clock.arm("slow", 4.0), "fast": clock.arm("fast", 0.5)}
    seconds = time_in_turn(arms, repeats=2, calls=3, clock=clock)
    assert seconds == {"slow": [4.0, 4.0], "fast": [0.5, 0.5]}


def test_the_clock_stops_after_the_work_is_finished():
    clock = Clock()

    def finish():
        clock.now += 10.0  # what the device still had to do

    seconds = time_in_turn(
        {"a": clock.arm("a", 0.0)}, repeats=1, calls=2, finish=finish, clock=clock
    )
    assert seconds == {"a": [5.0]}


def test_spread_of_known_figures():
    found = spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.minimum, found.lower_quartile, found.median) == (1.0, 2.0, 3.0)
    assert (found.upper_quartile, found.maximum) == (4.0, 5.0)
    assert spread([7.0]).upper_quartile == 7.0


def result(**arms):
    return CaseResult(
        case="allreduce-resnet50",
        suite="allreduce",
        devices=2,
        subject={
            "name": "tiny",
            "tensors": 6,
            "parameters": 4503,
            "bytes_per_replica": 18012,
        },
        settings={"repeats": 3, "calls_per_repeat": 2, "device_type": "cpu"},
        arms=arms,
    )


# The machine slows down threefold from the first repeat to the last: the ratio of
# neighbours is 2 throughout, that of unpaired figures would be anything from 0.67 to 6.
STOCK = ArmResult((0.2, 0.4, 0.6))
OURS = ArmResult((0.1, 0.2, 0.3))


def test_ratios_are_taken_repeat_by_repeat():
    assert relative_speed(OURS, STOCK) == pytest.approx((2.0, 2.0, 2.0))


def test_ratios_compare_images_not_steps():
    one = ArmResult((1.0,), items_per_call=64)
    four = ArmResult((2.0,), items_per_call=256)
    assert relative_speed(four, one) == (2.0,)


LINK_SETTINGS = {
    "workers": 2,
    "repeats": 2,
    "calls_per_repeat": 1,
    "device_type": "cpu",
    "link_rate": "1gbit",
}


def trained_by(workers, **arms):
    settings = {
        "workers": workers,
        "repeats": 3,
        "calls_per_repeat": 2,
        "device_type": "cpu",
        "load_before_and_after": [0.5, 2.25],
    }
    return dataclasses.replace(
        result(), suite="train", devices=workers, settings=settings, arms=arms
    )


def test_efficiency_is_per_worker_and_repeat():
    # Three workers, 192 images in 1.5 times the time that one needs for its 64: twice
    # the images of one process in the same time, by three. The machine slows down.
    one = ArmResult((0.1, 0.2, 0.4), items_per_call=64)
    three = ArmResult((0.15, 0.3, 0.6), items_per_call=192)
    found = trained_by(3, **{"one-process": one, "tfdp-mpi": three})
    assert efficiency(found)["tfdp-mpi"] == pytest.approx((2 / 3,) * 3)
    assert efficiency(found)["one-process"] == (1.0,) * 3
    assert efficiency(result(tfdp=OURS)) == {}
    text = format_result(found)
    assert "3 CPU devices in 3 processes" in text
    assert text.splitlines()[1].split()[-1] == "efficiency"
    assert "0.67 (0.67 .. 0.67)" in text.splitlines()[3]
    assert text.splitlines()[-1] == "load of the machine before 0.5, after 2.2"
    plain = json.loads(json.dumps(found.to_json()))
    assert plain["arms"]["tfdp-mpi"]["efficiency"]["median"] == pytest.approx(2 / 3)


def test_several_workers_have_arms_of_their_own():
    sums = Request(CASES["allreduce-resnet50"], devices=1, workers=2).arm_names
    ours = ("stock-multi-worker", "tfdp-sockets", "tfdp-mpi", "tfdp-tensorflow")
    assert sums == ours
    training = Request(CASES["train-mlp"], devices=1, workers=2).arm_names
    assert training == ("one-process", "no-exchange", *ours)
    assert GROUP_ARMS["stock-multi-worker"].why_left_out(1) is None
    assert "one logical CPU" in GROUP_ARMS["stock-multi-worker"].why_left_out(2)


@pytest.mark.parametrize(
    "options, problem",
    [
        (["--arms", "tfdp-mpi"], "tfdp-mpi: only with --workers"),
        (["--workers", "2", "--arms", "stock-default"], "no arm of allreduce-resnet50"),
        (["allreduce", "--workers", "2", "--arms", "one-process"], "no arm of"),
        (["--workers", "2", "--device-type", "gpu"], "--device-type cpu"),
        (["execution", "--workers", "2"], "leave out --workers"),
        (
            ["train", "--case", "allreduce-resnet50"],
            "python -m benchmarks.bench --list",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_at_once(options, problem):
    with pytest.raises(ConfigurationError, match=problem):
        bench(options)


def bench(options):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(options))


@pytest.mark.parametrize(
    "options",
    [
        ["training"],
        ["--case", "resnet"],
        ["--devices", "0"],
        ["--devices", "two"],
        ["--repeats", "-1"],
        ["--arms", "mine"],
    ],
)
def test_options_that_are_none_are_refused(options):
    with pytest.raises(SystemExit):
        bench(options)


def test_a_suite_lists_its_own_cases(capsys):
    assert bench(["train", "--list"]) == 0
    listed = capsys.readouterr().out
    assert "train-mlp" in listed
    assert "allreduce" not in listed


def test_the_best_stock_arm_is_the_fastest_stock_one():
    arms = {"stock-default": STOCK, "stock-one-device": OURS}
    fastest = ArmResult((0.01, 0.01, 0.01))
    assert result(**arms, tfdp=fastest).best_stock == "stock-one-device"
    assert result(tfdp=fastest).best_stock is None


def test_a_result_survives_json():
    before = result(**{"stock-default": STOCK, "tfdp": OURS})
    plain = json.loads(json.dumps(before.to_json()))
    assert CaseResult.from_json(plain) == before
    assert plain["arms"]["tfdp"]["times_as_fast_as"]["stock-default"]["median"] == 2.0
    assert plain["arms"]["tfdp"]["seconds_spread"]["maximum"] == 0.3


def test_the_table_shows_medians_spreads_and_ratios():
    arms = {"stock-default": STOCK, "tfdp": OURS}
    title, header, stock, ours = format_result(result(**arms)).splitlines()
    assert "2 CPU devices" in title and "4,503 parameters" in title
    assert header.split() == "arm ms min .. max times as fast as stock-default".split()
    assert ours.split() == (
        "tfdp 200 (150 .. 250) 100 .. 300 2.00 (2.00 .. 2.00)".split()
    )
    assert stock.split() == "stock-default 400 (300 .. 500) 200 .. 600 1".split()


def test_the_heading_says_what_the_figures_belong_to():
    report = Report(
        command="python -m benchmarks.bench",
        date="2026-01-01T00:00:00+00:00",
        machine={
            "processor": "a processor",
            "usable_cores": 2,
            "memory_bytes": 2**34,
            "system": "Linux",
        },
        versions={"python": "3.11.7"},
        results=(),
        failures=(),
    )
    heading = format_heading(report)
    for fact in ("a processor, 2 usable cores, 16 GiB", "python 3.11.7", "2026-01-01"):
        assert fact in heading
    assert "FAILED: why" in format_failure(Failure("train-mlp", 2, "why"))
    of_an_arm = format_failure(Failure("train-mlp", 2, "why", arm="tfdp-mpi"))
    assert of_an_arm == "train-mlp, tfdp-mpi, 2 devices: FAILED: why"


def test_every_case_names_what_exists():
    for case in CASES.values():
        subjects = GRADIENT_SETS if case.suite == "allreduce" else MODELS
        assert {case.subject, case.quick_subject} <= set(subjects)
        assert set(case.arms) <= set(ARMS)
        assert any(arm.startswith("stock-") for arm in case.arms)
        assert "tfdp" in case.arms


def test_an_arm_is_compared_with_the_one_process_that_it_names():
    # Two workers, twice the images in the same time: 1 of the speed of the arm that it
    # names, though that is half as fast as the other.
    named = {"one_process": "torch-one-process"}
    figures = {
        "one-process": ArmResult((0.1,), items_per_call=64),
        "torch-one-process": ArmResult((0.2,), items_per_call=64, facts=named),
        "torch-gloo": ArmResult((0.2,), items_per_call=128, facts=named),
    }
    assert efficiency(trained_by(2, **figures))["torch-gloo"] == (1.0,)
    del figures["torch-one-process"]
    found = trained_by(2, **figures)
    assert "torch-gloo" not in efficiency(found)
    assert "torch-gloo" in format_result(found)


@pytest.mark.parametrize("reason", ["is no root", None])
def test_hosts_that_cannot_be_made_say_why(monkeypatch, reason):
    def refused(*words):
        raise subprocess.CalledProcessError(1, words, stderr="not permitted\n")

    monkeypatch.setattr(two_hosts_module, "why_no_hosts", lambda: reason)
    monkeypatch.setattr(two_hosts_module, "_run", refused)
    with pytest.raises(DeviceError, match=reason or "'not permitted'"):
        with two_hosts_module.two_hosts("1gbit"):
            raise AssertionError("no hosts")


def test_bytes_on_the_link_stand_in_the_table():
    sent = {"sent_bytes_per_call": [2.5e6, 3.0e6]}
    arms = {"tfdp-sockets": dataclasses.replace(OURS, facts=sent)}
    found = dataclasses.replace(result(**arms), settings=LINK_SETTINGS)
    text = format_result(found)
    assert "on 2 hosts, a link of 1gbit" in text
    assert text.splitlines()[2].split()[-1] == "3"


def test_cases_are_selected_by_suite_and_name():
    defaults = [case.name for case in select_cases()]
    by_default = [
        case for case in CASES.values() if case.suite in ("allreduce", "train")
    ]
    assert defaults == [case.name for case in by_default]
    (execution,) = select_cases("execution")
    assert select_cases(names=[execution.name]) == [execution]
    names = ["train-cnn", "allreduce-resnet50"]
    assert [case.name for case in select_cases("train", names)] == ["train-cnn"]


def test_bert_base_has_the_published_size():
    shapes = GRADIENT_SETS["bert-base"]()
    # Devlin et al. 2018 say 110M; the exact count of the published uncased checkpoint
    # without its pre-training heads is 109,482,240.
    assert len(shapes) == 199
    assert count_parameters(shapes) == 109_482_240


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "report.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text("utf-8")) == {"a": 1}
    assert os.listdir(tmp_path) == ["report.json"]


def test_figures_need_no_tensorflow():
    done = run_program(
        "import sys, benchmarks.bench.__main__\n"
        "import benchmarks.bench.one_process.worker\n"
        "print({'tensorflow', 'keras'} & set(sys.modules))"
    )
    assert done.stdout == "set()\n", done.stderr
