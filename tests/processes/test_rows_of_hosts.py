"""Hosts whose batches have other static numbers of rows: one row, two, three."""

import numpy as np
import pytest

from tests.support.branches import trained_on_hosts
from tests.support.workers import Workers

KINDS = ("plain", "sync")


@pytest.mark.worth_seconds(20)
@pytest.mark.parametrize(
    "devices", [2, pytest.param(1, marks=pytest.mark.slow)], ids=["2x2", "2x1"]
)
def test_gradients_of_branches_meet_their_own(tmp_path, devices):
    variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
    module = "tests.support.branches"
    with Workers(2, module, tmp_path / "w", *KINDS, variables=variables) as workers:
        workers.succeed()
    for kind in KINDS:
        first, one = trained_on_hosts(None, kind)
        for rank in range(2):
            with np.load(tmp_path / f"w.{kind}.{rank}.npz") as found:
                several = [found[name] for name in found.files]
            for a, b in zip(one, several, strict=True):
                # Three updates of 0.1 times gradients below 1, of sums of 7 rows.
                np.testing.assert_allclose(b, a, rtol=0, atol=2e-6)
        moved = [np.abs(a - b).max() for a, b in zip(one, first, strict=True)]
        assert max(moved) > 1e-2
