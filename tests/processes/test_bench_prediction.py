"""`tfdp measure` and `tfdp bench prediction` with real processes, on a tiny subject."""

import json

import pytest

from tests.support.fresh_python import run_python
from tfdp.simulator.machine_file import read_machine
from tfdp.simulator.step import predict_step


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


@pytest.mark.slow
def test_a_step_is_predicted_beside_the_measured_one(tmp_path):
    path = tmp_path / "rows.json"
    done = run_python(
        *("-m", "tfdp", "bench", "prediction", "--quick", "--json", path),
        *("--timeout-seconds", "800"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(path.read_text("utf-8"))["rows"]
    assert row["subject"] == "mlp-tiny" and row["place"] == "2x1"
    assert row["predicted"] > row["without_sums"] > 0
    assert "1 steps: off by" in done.stdout
