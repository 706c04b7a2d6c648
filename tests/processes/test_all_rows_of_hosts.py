"""Real processes: losses, metrics and layers see the rows of all hosts."""

import numpy as np
import pytest

from tests.support import all_rows_hosts
from tests.support.in_batch_losses import LOSSES
from tests.support.parity import UNIT_ROUND_OFF
from tests.support.workers import Workers

SOME = ("InfoNCE:12", "Dice:9", "VICReg:9", "triplets:1")
EVERY = tuple(f"{name}:{rows}" for name in LOSSES for rows in (12, 9, 1))
# As in tests/devices/test_on_all_rows.py, with the sums of a normalization before.
BOUND = 2 * 2 * 12 * 10 * 40 * UNIT_ROUND_OFF


@pytest.mark.worth_seconds(30)
@pytest.mark.parametrize(
    "devices,wanted",
    [
        pytest.param(2, SOME, id="2x2"),
        pytest.param(1, EVERY, id="2x1-every", marks=pytest.mark.slow),
        pytest.param(2, EVERY, id="2x2-every", marks=pytest.mark.slow),
    ],
)
def test_gradients_and_numbers_are_one_devices(tmp_path, devices, wanted):
    variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
    module = "tests.support.all_rows_hosts"
    with Workers(2, module, tmp_path / "w", *wanted, variables=variables) as workers:
        workers.succeed()
    for name, expected in all_rows_hosts.steps(None, wanted).items():
        for rank in range(2):
            with np.load(tmp_path / f"w.{rank}.npz") as found:
                own = found[name]
            if name.endswith("numbers"):
                np.testing.assert_allclose(own, expected, 2e-5, 1e-6, err_msg=name)
                continue
            assert np.max(np.abs(expected)) > 1e-4
            largest = np.max(np.abs(expected))
            assert np.max(np.abs(own - expected)) <= BOUND * largest, name
            ratio = np.dot(own, expected) / np.dot(expected, expected)
            assert abs(ratio - 1) <= 1e-6, name
