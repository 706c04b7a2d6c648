"""Hosts whose loops run a `tf.function` on each replica; the last batch is short."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support.function_loop import Loop
from tests.support.workers import Workers


@pytest.mark.worth_seconds(20)
@pytest.mark.parametrize(
    "devices", [2, pytest.param(1, marks=pytest.mark.slow)], ids=["2x2", "2x1"]
)
def test_each_host_counts_the_rows_of_all(tmp_path, devices):
    """Hosts met for other exchanges, since each took the function apart by itself."""
    variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
    module = "tests.support.function_loop"
    with Workers(2, module, tmp_path / "w", variables=variables) as workers:
        workers.succeed()
    one = Loop(tf.distribute.get_strategy()).trained(in_graph=True)
    for rank in range(2):
        with np.load(tmp_path / f"w.{rank}.npz") as found:
            several = [found[name] for name in found.files]
        for mine, theirs in zip(several, [*one, *one], strict=True):
            # As in tests/devices/test_given_functions.py.
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=5e-6)
