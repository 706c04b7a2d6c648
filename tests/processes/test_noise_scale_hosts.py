"""The gradient noise scale of two hosts is that of one with as many replicas."""

import json

import numpy as np
import pytest

from tests.support.workers import Workers

PROGRAM = "tests.support.noise_workers"


def found_by(workers, devices, *arguments):
    variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
    with Workers(workers, PROGRAM, *arguments, variables=variables) as started:
        outputs = started.succeed()
    return [
        json.loads(line.partition(" ")[2])
        for output in outputs
        for line in output.splitlines()
        if line.startswith("noise ")
    ]


@pytest.mark.worth_seconds(20)
def test_two_hosts_find_what_one_finds():
    (expected,) = found_by(1, 4)
    hosts = found_by(2, 2)
    assert len(hosts) == 2
    assert hosts[0] == hosts[1]  # the same bits on both
    assert expected["replicas"] == hosts[0]["replicas"] == 4
    assert len(expected["norms"]) == 6
    # Other orders of sums in float32, over six steps of training.
    np.testing.assert_allclose(hosts[0]["norms"], expected["norms"], rtol=1e-4)
    finite = [np.nan_to_num(f["estimate"]) for f in (hosts[0], expected)]
    np.testing.assert_allclose(*finite, rtol=1e-3)


@pytest.mark.worth_seconds(20)
def test_rounded_gradients_leave_the_local_norms_as_they_are():
    exact, rounded = (found_by(2, 1, *wire)[0] for wire in ((), ("bfloat16",)))
    first, other = exact["norms"][0], rounded["norms"][0]
    # Of the first step: later ones have other weights.
    assert [first[i] for i in (0, 2, 3)] == [other[i] for i in (0, 2, 3)]
    # Each gradient is rounded twice, by 2^-9 of itself at most, and then squared.
    assert 0 < abs(other[1] / first[1] - 1) < 2 * 2 * 2**-9
