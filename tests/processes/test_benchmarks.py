"""The scripts of `benchmarks/` run, on tiny subjects: no figure means anything."""

import importlib.util
import json

import pytest

from tests.support.fresh_python import run_python

# Sums of one arm of the script's own; without it ten groups of processes would start.
OF_WORKERS = ["--case", "allreduce-resnet50", "--arms", "tfdp-sockets-int8"]


@pytest.mark.worth_seconds(15.0)
@pytest.mark.parametrize(
    "script, options",
    [
        pytest.param("balance", [], marks=pytest.mark.slow),
        ("checkpoint", []),
        ("compression", []),
        ("epochs", []),
        ("first_step", ["--devices", "1"]),
        ("links", []),
        ("memory", ["--devices", "2"]),
        ("muon", ["--devices", "2"]),
        ("peers", ["--arms", "keras", "tfdp", "--devices", "2"]),
        ("second_axis", []),
        pytest.param("updates", [], marks=pytest.mark.slow),
        pytest.param("prediction", [], marks=pytest.mark.slow),
        pytest.param("stragglers", [], marks=pytest.mark.slow),
        pytest.param("staleness", [], marks=pytest.mark.slow),
        ("workers", OF_WORKERS),
    ],
)
def test_a_script_measures_and_writes_its_figures(script, options, tmp_path):
    path = tmp_path / "figures.json"
    done = run_python(
        *("-m", f"benchmarks.{script}", "--quick", "--repeats", "1"),
        *("--json", path, *options),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text("utf-8"))
    assert report["suite"].replace("-", "_") == script
    assert report["machine"]["usable_cores"] >= 1
    assert any(report[key] for key in ("rows", "results", "seconds") if key in report)


@pytest.mark.slow
def test_a_program_of_a_library_is_compared_with_one_device():
    pytest.importorskip("keras_tuner", reason="needs keras-tuner")
    done = run_python("-m", "benchmarks.downstream.one", "keras_tuner", "hyperband")
    assert done.returncode == 0, done.stderr
    [line] = [text for text in done.stdout.splitlines() if text.startswith("{")]
    outcome = json.loads(line)
    assert outcome["state"] == "equal" and outcome["largest"] < 2e-5, outcome


def test_numbers_of_two_runs_are_compared():
    from benchmarks.downstream.cases import _largest

    one, other = (
        {"loss": [2.0, 4.0], "a": {"b": 1.0}},
        {"loss": [2.0, 3.0], "a": {"b": 1.0}},
    )
    assert _largest(one, one)[0] == 0.0
    # One of three is the distance, on the scale of the largest number.
    assert _largest(one, other) == (1.0 / 3.0, "/loss/1")
    assert _largest(one, {"loss": [2.0, 4.0]})[0] == float("inf")
    assert _largest({"a": float("nan")}, {"a": 0.0})[0] == float("inf")


def test_the_script_that_takes_minutes_says_what_it_measures():
    done = run_python("-m", "benchmarks.prediction", "--help")
    assert done.returncode == 0, done.stderr
    assert "--link-rates" in done.stdout


def test_a_script_says_which_package_it_needs():
    if importlib.util.find_spec("keras_hub") is not None:
        pytest.skip("KerasHub is installed: the script would train.")
    done = run_python("-m", "benchmarks.backbones", "--quick")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "pip install keras-hub" in done.stderr
