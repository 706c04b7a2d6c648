"""How many tests run at a time."""

import pytest

from tests.support.jobs import jobs, jobs_alone, usable_cores

GIB = 2**30


@pytest.mark.parametrize(
    "cores, gib, together, alone",
    [
        (1, 4, 2, 1),
        (2, 24, 2, 1),
        (3.5, 24, 3, 1),
        (4, 24, 4, 2),
        # 15.6 of "16 GiB" are there.
        (4, 15, 3, 1),
        (64, 512, 4, 2),
        (64, 8, 2, 1),
    ],
)
def test_cores_and_memory_limit_it(cores, gib, together, alone):
    assert jobs(cores, gib * GIB) == together
    assert jobs_alone(cores, gib * GIB) == alone


@pytest.mark.parametrize("text", ["max 100000", "", "1 0", "many few"])
def test_a_quota_that_says_nothing_limits_nothing(tmp_path, text):
    quota = tmp_path / "cpu.max"
    without = usable_cores(quota)
    assert without >= 1
    quota.write_text(text)
    assert usable_cores(quota) == without


def test_a_quota_limits_cores(tmp_path):
    quota = tmp_path / "cpu.max"
    quota.write_text("50000 100000\n")
    assert usable_cores(quota) == 0.5
