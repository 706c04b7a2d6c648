"""`tfdp tune` as a user runs it, with processes that train."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.fresh_python import run_python
from tfdp.tools.commands.tune_processes import TrialFailed, Trials
from tfdp.tools.commands.tune_run import what_fits
from tfdp.tools.tune.space import DEFAULTS, Setting, TrialLayout

PLACE = TrialLayout(1, 2, 16, "in_process")

SCRIPT = """
import keras
import numpy as np

def build_model():
    layers = [keras.layers.Dense(64, "relu") for _ in range(6)]
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(8)])
    model.compile("adam", loss="mse", jit_compile=False)
    return model

def make_data():
    return np.ones((10, 64), "float32"), np.ones((10, 8), "float32")

def failing():
    return (lambda: 1 / 0), make_data()

def waiting():
    import os, pathlib, time
    path = pathlib.Path(__file__).with_name("pid")
    path.with_suffix(".tmp").write_text(str(os.getpid()))
    path.with_suffix(".tmp").rename(path)
    time.sleep(900)

def few_steps_together():
    def build():
        model = build_model()
        model.compile("sgd", "mse", steps_per_execution=4, jit_compile=False)
        return model
    return build, make_data()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT, "utf-8")
    return path


def tune(*options):
    return run_python("-m", "tfdp", "tune", *options)


@pytest.mark.worth_seconds(10)
def test_one_trial_of_a_script(script, tmp_path):
    """As short as it can be: the defaults alone, which then stay."""
    values, page = tmp_path / "tuned.json", tmp_path / "tuned.html"
    options = ["--batch", 16, "--replicas", 2, "--trials", 1, "--steps", 3]
    done = tune(script, *options, "--json", values, "--page", page)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trial 0: the defaults: " in done.stdout
    assert "communication=tfdp.Communication()" in done.stdout.splitlines()
    found = json.loads(values.read_text("utf-8"))
    assert Setting.from_json(found["winner"]) == DEFAULTS
    assert found["place"]["automatic_engine"] == "in_process"
    assert found["trials"][0]["speed"] > 0
    assert "<img" in page.read_text("utf-8")


@pytest.mark.worth_seconds(8)
@pytest.mark.parametrize("workers", [1, 2])
def test_who_ends_it_ends_its_trial(script, workers):
    words = [f"{script}:waiting", "--batch", "16", "--replicas", "2"]
    command = [sys.executable, "-m", "tfdp", "tune", *words, "--workers", str(workers)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as tuning:
        path = script.with_name("pid")
        deadline = time.monotonic() + 600
        while not path.exists():
            assert tuning.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        tuning.terminate()
        assert tuning.wait(300) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)


@pytest.mark.slow
def test_two_processes_with_all_that_is_allowed(script, tmp_path):
    values = tmp_path / "tuned.json"
    options = ["--batch", 16, "--workers", 2, "--replicas", 1, "--trials", 100]
    options += ["--allow-lossy", "bfloat16", "--rounds", 2, "--steps", 3]
    done = tune(script, *options, "--json", values, "--finalists", 1, "--minutes", 60)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(values.read_text("utf-8"))
    tried = [Setting.from_json(trial["setting"]) for trial in found["trials"]]
    assert {each.lossy for each in tried} == {None, "bfloat16"}
    assert {each.engine for each in tried} == {"auto", "tensorflow"}
    assert all(trial["speed"] for trial in found["trials"]), done.stdout
    assert found["gains"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        Setting(shard="parameters", remat=True),
        Setting(accumulation_steps=2, shard="gradients"),
        Setting(engine="tensorflow", bucket_bytes=1 << 16),
    ],
    ids=repr,
)
def test_a_trial_of_each_kind(script, setting):
    found = Trials(str(script), PLACE, 4, 600).measure(setting)
    assert len(found.seconds) == 4
    # 6 x (64 x 64 + 64) and 64 x 8 + 8 weights.
    assert found.facts.model.gradient_bytes == 4 * (6 * 4160 + 520)


@pytest.mark.slow
def test_executions_of_several_steps_are_timed_by_the_step(script):
    target = f"{script}:few_steps_together"
    found = Trials(target, PLACE, 8, 600).measure(DEFAULTS)
    assert len(found.seconds) == 8


@pytest.mark.slow
def test_a_target_that_fails_is_told(script):
    with pytest.raises(TrialFailed, match="ZeroDivisionError"):
        Trials(f"{script}:failing", PLACE, 3, 600).measure(DEFAULTS)


@pytest.mark.slow
def test_what_fits_is_what_the_planner_says(script):
    stored = [("none", False, 1), ("parameters", True, 2)]
    found = what_fits(str(script), PLACE, 1, stored)
    assert set(found) == set(stored)
    assert not any(fits for _, fits in found.values())
    # Weights, and Adam's two slots for each; so small a model has no shards.
    assert min(peak for peak, _ in found.values()) > 3 * 4 * (6 * 4160 + 520)
    large = what_fits(str(script), PLACE, 10**9, stored)
    assert all(fits for _, fits in large.values())
