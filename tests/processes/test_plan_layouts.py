"""`tfdp plan` of scripts with a layout, as a user runs it."""

import json

import pytest

from tests.support.fresh_python import run_python
from tests.support.package_source import REPOSITORY

SCRIPT = """
import keras, numpy as np, resource, tfdp

mesh = keras.distribution.DeviceMesh(MESH, ["data", "model"])
layout = keras.distribution.LayoutMap(mesh)
layout[".*large/kernel"] = (None, "model")
for rule, axes in RULES.items():
    layout[rule] = axes
strategy = tfdp.auto_strategy(layout=layout)
with strategy.scope():
    model = keras.Sequential([keras.Input((WIDTH,))])
    model.add(keras.layers.Dense(WIDTH, name="large"))
    model.compile("adam", "mse")
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4e6, "weights were made"
model.fit(np.zeros((8, WIDTH), "f"), np.zeros((8, WIDTH), "f"), batch_size=8)
"""


def plan(tmp_path, *options, rules=None, mesh=(2, 4), width=64):
    source = SCRIPT.replace("RULES", repr(rules or {})).replace("MESH", repr(mesh))
    script = tmp_path / "train.py"
    script.write_text(source.replace("WIDTH", str(width)), "utf-8")
    return run_python("-m", "tfdp", "plan", script, *options)


@pytest.mark.worth_seconds(12)
def test_a_mesh_that_is_not_here_is_planned_without_its_weights(tmp_path):
    """A kernel of 10 GB on 8 devices, in a process of less than 4 GB."""
    written = tmp_path / "plan.json"
    done = plan(tmp_path, "--json", written, width=50_000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "large/kernel" in done.stdout and "data=2 x model=4" in done.stdout
    found = json.loads(written.read_text("utf-8"))
    kernel, bias = found["weights"]
    assert kernel["rests_as"] == [50_000, 12_500]
    assert kernel["bytes_per_device"] == 2_500_000_000
    assert kernel["computes_as"] in ("gathered", "column")
    assert bias["computes_as"] == "whole" and found["flaws"] == []
    assert found["bytes"]["device"] == 2_500_200_000


@pytest.mark.worth_seconds(8)
def test_faults_are_sentences_and_the_status_1(tmp_path):
    rules = {".*lagre/bias": ("model",), ".*large/bias": ("modle",)}
    done = plan(tmp_path, "--layout", rules=rules, mesh=(2, 3))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "'.*lagre/bias' meets no weight" in done.stdout
    assert "64 of dimension 1 cannot be cut into 3: sequential/large" in done.stdout
    assert (
        "'.*large/bias': Invalid axis names" in done.stdout and "modle" in done.stdout
    )
    assert "Traceback" not in done.stderr


@pytest.mark.worth_seconds(8)
def test_a_script_of_keras_distribution_is_planned_as_it_is(tmp_path):
    script = REPOSITORY / "tests" / "support" / "keras_distribution_script.py"
    written = tmp_path / "plan.json"
    arguments = ["--replicas", 4, "--json", written, "--", tmp_path / "x", "model"]
    done = run_python("-m", "tfdp", "plan", script, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    [kernel] = [
        weight
        for weight in json.loads(written.read_text("utf-8"))["weights"]
        if weight["path"] == "up/kernel"
    ]
    assert kernel["rests_as"] == [12, 8]


WITH_FUNCTIONS = """
import keras, numpy as np


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.up, self.down = keras.layers.Dense(64, name="up"), keras.layers.Dense(1)

    def call(self, x):
        return self.down(self.up(x))


def build_model():
    mesh = keras.distribution.DeviceMesh((2, 4), ["data", "model"])
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*up/kernel"] = (None, "model")
    distribution = keras.distribution.ModelParallel(layout_map=layout)
    keras.distribution.set_distribution(distribution)
    model = Net()
    model.compile("adam", "mse")
    return model


def make_data():
    return np.zeros((16, 8), "f"), np.zeros((16, 1), "f")
"""


@pytest.mark.worth_seconds(8)
def test_a_model_without_declared_inputs_gets_its_weights_from_a_batch(tmp_path):
    script = tmp_path / "functions.py"
    script.write_text(WITH_FUNCTIONS, "utf-8")
    done = run_python("-m", "tfdp", "plan", script, "--layout", "--batch", 8)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "net/up/kernel" in done.stdout and "8 x 16" in done.stdout


@pytest.mark.worth_seconds(8)
@pytest.mark.parametrize(
    "options,words",
    [
        (["--layout", "--replicas", 4, "--", "x", "data"], "gives no layout"),
        (["--memory", "1GB", "--", "x", "model"], "--memory is about the memory of"),
    ],
)
def test_what_cannot_be_planned_is_said(options, words):
    script = REPOSITORY / "tests" / "support" / "keras_distribution_script.py"
    done = run_python("-m", "tfdp", "plan", script, *options)
    assert done.returncode == 2
    assert words in done.stderr
