"""`tfdp measure` with real processes, on a tiny subject."""

import pytest

from tests.support.fresh_python import run_python
from tfdp.errors import ConfigurationError
from tfdp.tools.commands.measure import measure_target
from tfdp.tools.simulator.measured import read_machine
from tfdp.tools.simulator.step import predict_step


@pytest.mark.slow
def test_a_machine_is_measured_and_simulated(tmp_path):
    path = tmp_path / "machine.json"
    done = run_python(
        *("-m", "tfdp", "measure", "--quick", "--places", "1x2", "2x1"),
        *("--output", path, "--timeout-seconds", "800"),
    )
    assert done.returncode == 0, done.stderr
    machine = read_machine(path)
    (model,) = machine.models.values()
    assert set(model.step_seconds) == {(1, 1), (1, 2), (2, 1)}
    # 8 x 16, 16 x 16 and 16 x 10 weights with their biases.
    assert model.profile.gradient_bytes == 4 * (8 * 16 + 16 * 16 + 160 + 42)
    found = predict_step(machine.training("mlp-tiny", 2), 4)
    assert found.part_seconds["communication"] > 0


SCRIPT = """
import keras
import numpy as np

def build_model():
    layers = [keras.Input((6,)), keras.layers.Dense(5, "relu"), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    model.compile("adam", loss="mse")
    return model

def make_data():
    return np.ones((10, 6), "float32"), np.ones((10, 2), "float32")

def failing():
    return (lambda: 1 / 0), make_data()
"""


@pytest.mark.slow
def test_an_own_model_is_timed_without_sums(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT, "utf-8")
    settings = {"samples": 16, "steps": 3, "timeout_seconds": 400}
    found = measure_target(str(path), [1, 2], **settings)
    assert found.profile.name == "mine" and found.samples == 16
    assert [each.size_bytes for each in found.profile.gradients] == [120, 20, 40, 8]
    assert found.profile.forward_flops_per_sample == 2 * (6 * 5 + 5 * 2)
    assert set(found.step_seconds) == {(1, 1), (1, 2)}
    with pytest.raises(ConfigurationError, match="ZeroDivisionError"):
        measure_target(f"{path}:failing", [1], **settings)
