"""`tfdp check` as a user runs it: a script, its report, its exit status."""

import json

import pytest

from tests.support.fresh_python import run_python

# 29 rows in batches of 16: the second batch has 13, which two replicas cannot share.
SCRIPT = """
import keras
import numpy as np
import tensorflow as tf
from beside import CLASSES

def build_model():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(CLASSES)])
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model

def make_data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(29, 6)), rng.integers(0, CLASSES, 29)

def ready():
    # Starts TensorFlow's runtime: devices must have been set up before.
    assert len(tf.config.list_logical_devices("CPU")) == 3
    return {"build": build_model, "data": make_data(), "steps": 1, "batch_size": 29}

def broken():
    return (lambda: 1 / 0), make_data()

def not_compiled():
    return (lambda: keras.Sequential([keras.Input((6,))])), make_data()
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "beside.py").write_text("CLASSES = 3\n", "utf-8")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, "utf-8")
    return path


def check(target, *options):
    return run_python("-m", "tfdp", "check", target, *options)


@pytest.mark.worth_seconds(20)
def test_a_script_that_holds(script, tmp_path):
    report_path = tmp_path / "report.json"
    options = ["--steps", 2, "--batch-size", 16, "--json", report_path]
    done = check(script, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "HOLDS: all 2 variables" in done.stdout
    assert done.stderr == ""
    report = json.loads(report_path.read_text("utf-8"))
    assert report["ok"] is True
    assert report["target"] == str(script)
    assert report["batch_rows"] == [16, 13]
    assert [row["verdict"] for row in report["rows"]] == ["holds", "holds"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "beside.py",
        "report.json",
        "train.py",
    ]


def test_a_script_that_fails_names_the_cause(script, tmp_path):
    report_path = tmp_path / "report.json"
    options = ["--steps", 2, "--batch-size", 16, "--strategy", "mirrored"]
    done = check(script, *options, "--json", report_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cause: uneven batches: batch 2 of 13 rows" in done.stdout
    report = json.loads(report_path.read_text("utf-8"))
    assert report["ok"] is False
    assert report["causes"][0]["cause"] == "uneven batches"


def test_a_function_gives_its_own_options(script):
    done = check(f"{script}:ready", "--replicas", 3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 replicas" in done.stdout
    assert "1 steps, global batches of 29 rows" in done.stdout


@pytest.mark.parametrize(
    "function, expected",
    [
        ("broken", "ZeroDivisionError"),
        ("not_compiled", "must return a compiled model"),
    ],
)
def test_a_target_that_cannot_be_checked_exits_with_2(script, function, expected):
    done = check(f"{script}:{function}")
    assert done.returncode == 2, done.stdout + done.stderr
    assert expected in done.stderr
    assert done.stdout == ""
