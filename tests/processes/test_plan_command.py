"""`tfdp plan` as a user runs it, and a plan beside what the training took."""

import dataclasses
import json

import pytest

from tests.planning.__main__ import error_of, run_case
from tests.planning.case import Case
from tests.support.fresh_python import run_python

SCRIPT = """
import keras
import numpy as np

def build_model():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1000)])
    model.compile("adam", "mse", jit_compile=False)
    return model

def make_data():
    return np.zeros((64, 64), "float32"), np.zeros((64, 1000), "float32")
"""


def plan(*options):
    return run_python("-m", "tfdp", "plan", *options)


@pytest.mark.worth_seconds(30)
def test_a_script_in_a_memory_that_is_too_small(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, "utf-8")
    page, values = tmp_path / "plan.html", tmp_path / "plan.json"
    options = ["--batch", 512, "--memory", "1 MB", "--page", page, "--json", values]
    done = plan(script, *options)
    # 65,000 weights and Adam's two slots: 780 kB; a batch of 2.2 MB, twice as much as
    # the accumulators that halve it.
    assert done.returncode == 1, done.stdout + done.stderr
    assert "It does not fit in 1.0 MB" in done.stdout
    assert "gradient_accumulation_steps=2" in done.stdout
    assert str(page) in done.stdout.replace("\n", "")
    found = json.loads(values.read_text("utf-8"))
    assert found["plan"]["parts"]["weights"] == pytest.approx(260_000, abs=64)
    assert found["plan"]["fits"] is False
    assert "<img" in page.read_text("utf-8")


@pytest.mark.parametrize(
    "options,message",
    [
        (["NoSuchNet", "--batch", 8], "no model 'NoSuchNet'"),
        (["ResNet50", "--batch", 8, "--memory", "much"], "A size is a number"),
        (["ResNet50", "--batch", 8, "--shard", "all"], "shard must be"),
        (["ResNet50", "--batch", 8, "--page", "/no/such/p.html"], "no such folder"),
    ],
)
@pytest.mark.slow
def test_bad_options(options, message):
    done = plan(*options)
    assert done.returncode == 2
    assert message in done.stderr


# A process may take 5% more than its tensors: pages, pools, and what a kernel allocates
# for itself. On the other side the plan takes the worst of several orders of ops.
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("MobileNet", 8, 1, 0, False),
        Case("BERTMini", 8, 1, 0, False),
        Case("BERTMini", 4, 2, 3, True),
    ],
    ids=str,
)
def test_a_plan_is_near_what_was_measured(case):
    row = run_case(case)
    assert "failed" not in row, row
    assert dataclasses.asdict(case).items() <= row.items()
    assert abs(error_of(row)) < 0.10
    assert row["needed"] >= row["measured"]
