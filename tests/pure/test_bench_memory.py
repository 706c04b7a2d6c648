"""What the formulas of `tfdp bench memory` say."""

import pytest

from tfdp.bench.memory.command import expected_bytes
from tfdp.bench.memory.worker import MemoryRequest


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_formulas_are_those_of_the_paper(devices):
    parameters, layer = 3 * 10**2, 4 * 10**2
    peaks = [
        expected_bytes(MemoryRequest(devices, stage, layers=3, width=10)).peak
        for stage in range(4)
    ]
    assert peaks == [
        16 * parameters,
        8 * parameters + 8 * parameters / devices,
        4 * parameters + 12 * parameters / devices,
        16 * parameters / devices + layer,
    ]


def test_nothing_is_saved_on_one_replica():
    figures = {
        expected_bytes(MemoryRequest(1, stage, layers=3, width=10)).at_rest
        for stage in range(4)
    }
    assert figures == {12.0 * 300}
