"""Several hosts, one set of files: worker 0 writes, a restart goes on everywhere."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support import host_files
from tests.support.parity import classification_data
from tests.support.workers import Workers


def trained(folder, epochs, devices, shard):
    variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
    arguments = ("tests.support.host_files", folder, epochs, shard)
    with Workers(2, *arguments, variables=variables) as workers:
        outputs = workers.succeed()
    weights = []
    for rank in range(2):
        with np.load(folder / f"weights.{rank}.npz") as file:
            weights.append([file[name] for name in file.files])
    return outputs, weights


def variables_of(model):
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


@pytest.mark.worth_seconds(25)
@pytest.mark.parametrize(
    "devices, shard", [(1, "none"), (2, "none"), (1, "parameters"), (2, "optimizer")]
)
def test_one_worker_writes_and_a_restart_goes_on(tmp_path, devices, shard):
    trained(tmp_path, 2, devices, shard)
    outputs, weights = trained(tmp_path, 4, devices, shard)

    # Two epochs are behind, on the worker that reads no file as well.
    assert all("epochs 2\n" in output for output in outputs)
    for mine, theirs in zip(*weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)

    # The momentum was taken over, too: as 4 epochs without a break, up to the order of
    # sums of some 60 terms, 8 updates of at most 0.05 / (1 - 0.9) * 1 each.
    model = host_files.compiled_model()
    x, y = classification_data(48)
    model.fit(x, y, batch_size=24, epochs=4, shuffle=False, verbose=0)
    for mine, expected in zip(weights[0], model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=8 * 0.5 * 60 * 6e-8)

    # A header and one line per epoch: nobody else has written.
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 5
    # A checkpoint, to which both hosts write, holds the same model and optimizer.
    tfdp.checkpoint.merge_parts(tmp_path / "checkpoints", tmp_path / "merged.keras")
    merged = keras.models.load_model(tmp_path / "merged.keras")
    whole = keras.models.load_model(tmp_path / "model.keras")
    for mine, stored in zip(variables_of(merged), variables_of(whole), strict=True):
        np.testing.assert_array_equal(mine, stored)

    saved = keras.models.load_model(tmp_path / "model.keras")
    for mine, stored in zip(weights[0], saved.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, stored)

    # Exported by every host to a folder of its own.
    for rank in range(2):
        served = tf.saved_model.load(tmp_path / f"served.{rank}")
        for mine, stored in zip(served.variables, saved.weights, strict=True):
            np.testing.assert_array_equal(mine.numpy(), stored.numpy())
        # The same program on the same rows, maybe with another order of 33 terms.
        np.testing.assert_allclose(served.serve(x), saved(x), rtol=0, atol=4e-5)
