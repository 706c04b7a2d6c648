"""The MPI link: several processes under a real MPI launcher equal one device."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support import host_training
from tests.support.mpi import needs_mpi, run_by_mpi

pytestmark = needs_mpi

SCENARIOS = ("sgd", "accumulation", "masked-embedding")


@pytest.mark.worth_seconds(200)
def test_sums_by_mpi_equal_one_device(tmp_path):
    printed = run_by_mpi(
        2,
        "tests.support.host_training",
        tmp_path / "run",
        "none",
        *SCENARIOS,
        TFDP_DEVICES_PER_WORKER="2",
    )
    assert "engine mpi" in printed
    for name in SCENARIOS:
        expected = host_training.run(name, tf.distribute.get_strategy())
        for rank in range(2):
            with np.load(f"{tmp_path}/run.{name}.{rank}.npz") as got:
                for key, value in expected.items():
                    # As in test_multi_host.py.
                    np.testing.assert_allclose(got[key], value, rtol=0, atol=2e-5)
