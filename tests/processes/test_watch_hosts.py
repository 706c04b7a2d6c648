"""Damage on one of several hosts is named on all of them."""

import json

import pytest

from tests.support.workers import Workers

PROGRAM = "tests.support.watch_workers"


def told_by(workers, devices, *arguments):
    variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
    with Workers(workers, PROGRAM, *arguments, variables=variables) as started:
        outputs = started.succeed()
    told = [
        json.loads(line.partition(" ")[2])
        for output in outputs
        for line in output.splitlines()
        if line.startswith("told ")
    ]
    assert len(told) == workers
    assert told == [told[0]] * workers  # everybody is told the same
    return told[0]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sockets", "tensorflow"])
def test_healthy_hosts_are_alike(engine):
    told = told_by(2, 2, "healthy", engine)
    assert told == {"error": None, "message": "", "checks": 5, "finite": True}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sockets", "tensorflow"])
def test_a_replica_that_drifted_is_named_on_all_hosts(engine):
    told = told_by(2, 2, "drift", engine)
    assert told["error"] == "ReplicaDriftError"
    assert told["checks"] == 3
    assert "replica 3 (CPU:1 of worker 1) differs from the 3 others" in told["message"]
    assert "dense/kernel" in told["message"]


@pytest.mark.slow
@pytest.mark.parametrize("group", ["host", "all"])
def test_shards_that_each_host_has_are_compared(group):
    told = told_by(2, 2, "shard", "sockets", group)
    if group == "all":  # each is held once: nobody can tell
        assert told["error"] is None
    else:
        assert told["error"] == "ReplicaDriftError"
        assert "(shards)" in told["message"]


@pytest.mark.parametrize(
    "engine", ["sockets", pytest.param("tensorflow", marks=pytest.mark.slow)]
)
@pytest.mark.worth_seconds(12)
def test_a_nan_is_traced_to_its_host(engine):
    told = told_by(2, 2, "nan", engine)
    assert told["error"] == "NotFiniteError"
    assert "in step 3 of this fit" in told["message"]
    assert "replica 3 (CPU:1 of worker 1): first the input x" in told["message"]
    assert "replica 0" not in told["message"]
    assert told["finite"]


@pytest.mark.worth_seconds(12)
@pytest.mark.parametrize(
    "devices", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["2x1", "2x2"]
)
def test_a_host_that_trains_apart_looks_for_the_cause_alone(devices):
    variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
    with Workers(2, "tests.support.guard_apart", variables=variables) as started:
        outputs = started.succeed()
    other, bad = (
        json.loads(next(line for line in output.splitlines() if "told" in line)[5:])
        for output in outputs
    )
    assert other["found"] == []
    rank = 2 * devices - 1  # whose row it was
    assert [rank, "input", "x"] in bad["found"]
    assert [rank, "loss", "the loss"] in bad["found"]
    assert {finding[0] for finding in bad["found"]} == {rank}
    assert other["weights"] == bad["weights"]
    assert abs(bad["weights"][1][0]) < 1.0  # no NaN
