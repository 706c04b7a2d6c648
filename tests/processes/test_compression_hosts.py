"""Compressed gradients between hosts: real processes, every link."""

import numpy as np
import pytest

from tests.support import compressed_hosts
from tests.support.compression_table import IDENTITIES, METHODS
from tests.support.mpi import needs_mpi, run_by_mpi
from tests.support.workers import Workers

MODULE = "tests.support.compressed_hosts"
SOME = ["top-k", "int8", "power-sgd-start", "random-k-all"]


def check(path, name, hosts, devices):
    """All hosts have one result, and it and what is left are the gradients."""
    found = []
    for rank in range(hosts):
        with np.load(f"{path}.{name}.{rank}.npz") as file:
            arrays = [file[f"arr_{n}"] for n in range(len(file.files) - 1)]
            found.append((arrays[:2], arrays[2:], float(file["sent"])))
    for place, value in enumerate(found[0][0]):
        for weights, _, _ in found[1:]:
            np.testing.assert_array_equal(value, weights[place])
        total = sum(
            of_replica[place].astype(float)
            for of_step in compressed_hosts.draw(hosts * devices)
            for of_replica in of_step
        )
        left = sum(of_host[1][place].astype(float) for of_host in found)
        # As tests/devices/test_compression.py, with products that are sums of 64.
        replicas, steps = hosts * devices, compressed_hosts.STEPS
        bound = steps * (4 * replicas + 130) * 8 * replicas * steps * 2.0**-24
        np.testing.assert_allclose(left - value, total, rtol=0, atol=bound)
        if name in IDENTITIES:
            np.testing.assert_allclose(-value, total, rtol=0, atol=bound)
    return found[0][2]


# By optimizer: what stands beside the root of the variance, corrected or not.
ONE_BIT = {"one-bit-adam": 1 / np.sqrt(1 - 0.999), "one-bit-lamb": 1.0}


def check_one_bit(path, name, hosts, replicas):
    """Without momentum and with epsilon 1, of which v from one step hardly moves the
    root: w is minus what arrived over sqrt(v) + 1, and what arrived and is left after
    the first step are the gradients."""
    found = []
    for rank in range(hosts):
        with np.load(f"{path}.{name}.{rank}.npz") as file:
            arrays = [file[f"arr_{n}"] for n in range(len(file.files) - 1)]
            found.append((arrays[:2], arrays[2:], float(file["sent"])))
    first, *later = compressed_hosts.draw(replicas)
    for place, value in enumerate(found[0][0]):
        for weights, _, _ in found[1:]:
            np.testing.assert_array_equal(value, weights[place])
        start = sum(of_replica[place].astype(float) for of_replica in first)
        total = sum(g[place].astype(float) for of_step in later for g in of_step)
        left = sum(of_host[1][place].astype(float) for of_host in found)
        # v = (1 - beta_2) g^2 of the first step, corrected to g^2; in Adam epsilon is
        # corrected, too, to epsilon / sqrt(1 - beta_2).
        divisor = np.abs(start) + ONE_BIT[name]
        arrived = -value.astype(float) * divisor - start
        # As above; times what the division and the product may be off, 40 u of 100.
        np.testing.assert_allclose(arrived + left, total, rtol=0, atol=2e-3)
        assert np.abs(left).max() > 0.1
    return found[0][2]


def run(path, engine, devices, names, hosts=2):
    with Workers(hosts, MODULE, path, engine, devices, *names) as workers:
        workers.succeed()
    return {
        name: check_one_bit(path, name, hosts, hosts * devices)
        if name in ONE_BIT
        else check(path, name, hosts, devices)
        for name in names
    }


@pytest.mark.worth_seconds(40)
@pytest.mark.parametrize("devices", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_over_sockets(tmp_path, devices):
    sent = run(tmp_path / "w", "sockets", devices, [*SOME, *ONE_BIT])
    dense = 4 * sum(np.prod(shape) for shape in compressed_hosts.SHAPES)
    # Headers, and the flag of what is not finite, are below 400 bytes.
    assert sent["int8"] < dense * (1 + 4 / 32) / 4 + 400
    assert sent["top-k"] < dense * 2 * 0.1 + 400
    assert sent["random-k-all"] > dense
    for name in ONE_BIT:
        assert sent[name] < dense / 20 + 400


@pytest.mark.slow
def test_every_method_over_sockets(tmp_path):
    """Three hosts: sums are rounded again, and passed on by others."""
    run(tmp_path / "w", "sockets", 1, METHODS, hosts=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_over_tensorflow(tmp_path, name):
    run(tmp_path / "w", "tensorflow", 2, [name])


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize("name", [*SOME, "sign"])
def test_over_mpi(tmp_path, name):
    path, hosts = tmp_path / "w", 3
    run_by_mpi(hosts, MODULE, path, "mpi", 1, name)
    check(path, name, hosts, 1)
