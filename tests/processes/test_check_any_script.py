"""`tfdp check`, `plan` and `tune` on scripts that were written only to train."""

import json

import pytest

from tests.devices.test_docs import BLOCK
from tests.support.fresh_python import run_python
from tests.support.package_source import REPOSITORY

# A model that Keras cannot make from its configuration, a generator, a required
# argument, and an end that hides what happened in fit.
HOSTILE = """
import argparse
import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras
import numpy as np
import tensorflow as tf

keras.backend.clear_session()
tf.config.threading.set_intra_op_parallelism_threads(1)
parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, required=True)
rows = parser.parse_args().rows
print("begins")

class Net(keras.Model):
    def __init__(self, units):
        super().__init__()
        self.inner, self.outer = keras.layers.Dense(units), keras.layers.Dense(1)

    def call(self, x):
        return self.outer(self.inner(x))

def squares(y, predicted):
    return tf.reduce_mean((y - predicted) ** 2, axis=-1)

def batches():
    rng = np.random.default_rng(0)
    while True:
        x, y = rng.normal(size=(rows, 8)), rng.normal(size=(rows, 1))
        yield x.astype("float32"), y.astype("float32")

try:
    with tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"]).scope():
        net = Net(8)
        net.compile(keras.optimizers.SGD(0.1), squares)
    net.fit(batches(), steps_per_epoch=10**6, epochs=10**6)
except Exception as error:
    print("hidden", error)
finally:
    sys.exit(3)
"""


@pytest.fixture
def readme(tmp_path):
    text = (REPOSITORY / "README.md").read_text("utf-8")
    [program, *_] = BLOCK.findall(text)
    path = tmp_path / "train.py"
    path.write_text(program, "utf-8")
    return path


def run(command, *options):
    return run_python("-m", "tfdp", command, *options)


@pytest.mark.worth_seconds(45)
@pytest.mark.parametrize(
    "command, options",
    [
        ("check", ["--steps", 1]),
        ("plan", ["--replicas", 2, "--memory", "1GB", "--quick"]),
        ("tune", ["--replicas", 2, "--trials", 1, "--steps", 2]),
    ],
)
def test_the_script_of_the_readme(command, options, readme, tmp_path):
    pytest.importorskip("sklearn")
    values = tmp_path / "found.json"
    done = run(command, readme, *options, "--json", values)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(values.read_text("utf-8"))
    # The script's batch size: 64.
    if command == "check":
        assert found["ok"] and found["batch_rows"] == [64]
    elif command == "plan":
        assert found["plan"]["local_rows"] == 32 and found["plan"]["fits"]
    else:
        assert found["place"]["rows"] == 64 and found["trials"][0]["speed"] > 0
    assert "Epoch" not in done.stdout + done.stderr


@pytest.mark.worth_seconds(15)
def test_a_script_that_hides_its_fit(tmp_path):
    script, values = tmp_path / "hostile.py", tmp_path / "found.json"
    script.write_text(HOSTILE, "utf-8")
    options = ["--steps", 2, "--json", values]
    done = run("check", script, *options, "--", "--rows", "17")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(values.read_text("utf-8"))["batch_rows"] == [17, 17]
    # What the script prints does not mix with the report, and is printed once.
    assert "begins" not in done.stdout and done.stderr.count("begins") == 1
    assert "hidden" not in done.stderr


@pytest.mark.worth_seconds(30)
@pytest.mark.parametrize("command", ["check", "plan", "tune"])
def test_an_example_with_a_loop_of_its_own_is_refused(command, tmp_path):
    pytest.importorskip("sklearn")
    replicas = [] if command == "plan" else ["--replicas", 2]
    example = REPOSITORY / "examples" / "custom_loop.py"
    done = run(command, example, *replicas)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr, done.stderr
    [line] = [x for x in done.stderr.splitlines() if x.startswith(f"tfdp {command}:")]
    assert "strategy.run is called" in line and "Define build_model()" in line
