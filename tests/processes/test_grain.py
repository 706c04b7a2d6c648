"""`grain` loaders on several hosts: each reads its shard, or is told that it does not.

Faults, and going on, are in test_resume.py.
"""

import json

import numpy as np
import pytest

from tests.fault_plans import BOUND
from tests.support.workers import Workers

pytest.importorskip("grain", reason="pip install 'tfdp[grain]'")
MODULE = "tests.support.resumed_training"
# One device has no part of its own in plain normalization and in what dropout draws.
PLAIN = {"optimizer": "sgd", "dtype": "float64", "dropout": 0.0}


def options(folder, name, **others):
    return json.dumps(
        {"folder": str(folder / f"{name}-saved"), "result": str(folder / name)} | others
    )


@pytest.mark.worth_seconds(40)
def test_shards_together_are_the_global_batches(tmp_path):
    """The reference is one device, on the batches of both shards put together."""
    with Workers(
        2, MODULE, options(tmp_path, "shards", data="grain-shards", **PLAIN)
    ) as workers:
        outputs = workers.succeed()
    assert not any("reads all" in output for output in outputs)
    with Workers(
        1, MODULE, options(tmp_path, "joined", data="grain-joined", **PLAIN)
    ) as worker:
        worker.succeed()
    with np.load(tmp_path / "joined.0.npz") as file:
        expected = dict(file)
    for rank in range(2):
        with np.load(tmp_path / f"shards.{rank}.npz") as found:
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=0, atol=BOUND)


@pytest.mark.slow
def test_shards_of_others_are_refused_on_all_hosts(tmp_path):
    with Workers(2, MODULE, options(tmp_path, "wrong", data="grain-wrong")) as workers:
        outputs = workers.outputs(300)
        codes = [process.returncode for process in workers.processes]
    assert all(codes), outputs
    for output in outputs:
        assert "ConfigurationError: The grain.DataLoader reads shard" in output, output


@pytest.mark.slow
def test_shards_of_unequal_length_are_read_to_their_ends():
    with Workers(2, "tests.support.grain_unequal_shards") as workers:
        for output in workers.succeed():
            assert "[[6, 1], [6, 6, 1]]" in output and "all alike" in output
