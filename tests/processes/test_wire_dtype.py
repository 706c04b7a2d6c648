"""Gradients that cross hosts in 16 bits: real processes, sockets and MPI."""

import numpy as np
import pytest

from tests.support import wire_training
from tests.support.mpi import needs_mpi, run_by_mpi
from tests.support.workers import Workers

HOSTS = 2
MODULE = "tests.support.wire_training"
# Half a unit in the last place of 8 and 11 significant bits.
ROUND_OFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def check(path, model, saved, wire_dtype):
    """Both hosts have one step's weights, off by the rounding and no more."""
    before, parts, magnitudes = wire_training.gradients_of_hosts(model, HOSTS)
    steps = []
    for rank in range(HOSTS):
        with np.load(f"{path}.{saved}.{rank}.npz") as file:
            steps.append([file[key] for key in file.files])
    for mine, theirs in zip(*steps, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    largest = 0.0
    # Statistics, which are no weights, come last.
    for place, weight in enumerate(before):
        by_host = [part[place].astype(float) for part in parts]
        expected = weight - sum(by_host)
        # Each number is rounded when a host sends it and when the sum is sent; sums of
        # some 24 x 6 float32 terms below 4 are off by 144 * 4 * 2^-24 = 3.5e-5. A part
        # that is missing is 100 times more.
        factor = (1 + ROUND_OFF[wire_dtype]) ** 2 - 1
        bound = factor * sum(sent[place] for sent in magnitudes) + 3.5e-5
        error = np.abs(steps[0][place] - expected)
        assert (error <= bound).all(), (saved, place, error.max())
        largest = max(largest, error.max())
    assert largest > 1e-5  # rounded indeed: in float32 it is 1e-7
    return steps[0][len(before) :]


def check_all(path, wire_dtype, by_hand=True):
    check(path, "dense", "dense", wire_dtype)
    check(path, "embedding", "embedding", wire_dtype)
    if by_hand:
        check(path, "dense", "by-hand", wire_dtype)
    mean, _ = check(path, "statistics", "statistics", wire_dtype)
    # No gradient, so not rounded: the mean of 24 numbers below 4.
    expected = wire_training.images().mean(axis=0, dtype=float)
    np.testing.assert_allclose(mean, expected, rtol=0, atol=24 * 4 * 2.0**-24)


@pytest.mark.worth_seconds(17)
@pytest.mark.parametrize(
    "shard, wire_dtype", [("none", "bfloat16"), ("optimizer", "float16")]
)
def test_over_sockets(tmp_path, shard, wire_dtype):
    path = tmp_path / "step"
    with Workers(HOSTS, MODULE, path, shard, wire_dtype) as workers:
        outputs = workers.succeed()
    assert "engine sockets" in outputs[0]
    check_all(path, wire_dtype, by_hand=shard == "none")


@needs_mpi
@pytest.mark.parametrize("wire_dtype", ["bfloat16", "float16"])
def test_over_mpi(tmp_path, wire_dtype):
    path = str(tmp_path / "step")
    printed = run_by_mpi(
        HOSTS, MODULE, path, "none", wire_dtype, TFDP_DEVICES_PER_WORKER="2"
    )
    assert "engine mpi" in printed
    check_all(path, wire_dtype)
