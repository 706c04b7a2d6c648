"""Hosts whose batches, or elements of batches, have other numbers of rows."""

import contextlib

import numpy as np
import pytest

from tests.support import fixmatch
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


@pytest.mark.worth_seconds(20)
@pytest.mark.parametrize(
    "devices", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["2x1", "2x2"]
)
def test_each_host_has_its_part_of_elements_of_unlike_lengths(tmp_path, devices):
    variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
    module = "tests.support.fixmatch"
    with Workers(2, module, tmp_path / "w", variables=variables) as workers:
        workers.succeed()
    _, one = fixmatch.trained(contextlib.nullcontext())
    for rank in range(2):
        with np.load(tmp_path / f"w.{rank}.npz") as found:
            several = [found[name] for name in found.files]
        for a, b in zip(one, several, strict=True):
            # As in tests/devices/test_elements_of_unlike_lengths.py.
            np.testing.assert_allclose(b, a, rtol=0, atol=1.3e-5)
