"""Ray Train, the real one: two workers, of which one dies, equal one device."""

import importlib.util
import pathlib
import re

import keras
import numpy as np
import pytest

from tests.support import ray_job
from tests.support.fresh_python import run_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray is not installed: pip install 'ray[train]'",
    ),
]


def test_a_training_of_ray_that_was_started_again_equals_one_device(tmp_path):
    done = run_python("-m", "tests.support.ray_job", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert tmp_path.joinpath("died").exists()
    epoch, loss = re.search(r"^metrics (\d+) (\S+)$", done.stdout, re.M).groups()
    path = pathlib.Path(re.search(r"^checkpoint (.+)$", done.stdout, re.M)[1])
    kept = keras.saving.load_model(path / "model.keras")
    alone = ray_job.build()
    history = alone.fit(
        *ray_job.data(),
        batch_size=8,
        epochs=ray_job.EPOCHS,
        shuffle=False,
        verbose=0,
    ).history
    assert int(epoch) == ray_job.EPOCHS - 1
    # 12 steps of Adam at 0.001 move a weight by 1e-2; sums of 8 rows in another order
    # differ by 1e-7 of a gradient, of which Adam makes 1e-6 of a step at the most.
    np.testing.assert_allclose(float(loss), history["loss"][-1], rtol=1e-5)
    for mine, its in zip(alone.get_weights(), kept.get_weights(), strict=True):
        np.testing.assert_allclose(its, mine, rtol=0, atol=1e-5)
