"""Several hosts, one set of files: worker 0 writes, a restart goes on everywhere."""

import keras
import numpy as np
import pytest

from tests.support.workers import Workers


def trained(folder, epochs, devices):
    variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
    arguments = ("tests.support.host_files", folder, epochs)
    with Workers(2, *arguments, variables=variables) as workers:
        outputs = workers.succeed(timeout_seconds=120)
    weights = []
    for rank in range(2):
        with np.load(folder / f"weights.{rank}.npz") as file:
            weights.append([file[name] for name in file.files])
    return outputs, weights


@pytest.mark.timeout(400)
@pytest.mark.parametrize("devices", [1, 2])
def test_one_worker_writes_and_a_restart_goes_on(tmp_path, devices):
    trained(tmp_path, 2, devices)
    outputs, weights = trained(tmp_path, 4, devices)

    # Two epochs are behind, on the worker that reads no file as well.
    assert all("epochs 2\n" in output for output in outputs)
    for mine, theirs in zip(*weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)

    # A header and one line per epoch: nobody else has written.
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 5
    saved = keras.models.load_model(tmp_path / "model.keras")
    for mine, stored in zip(weights[0], saved.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, stored)
