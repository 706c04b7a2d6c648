"""`callbacks.Autotune` on two hosts: they switch together, and worker 0 decides."""

import json

import pytest

from tests.support.workers import Workers

PROGRAM = "tests.support.autotune_workers"


def said_by(outputs):
    return [
        json.loads(line.partition(" ")[2])
        for output in outputs
        for line in output.splitlines()
        if line.startswith("tuned ")
    ]


@pytest.mark.worth_seconds(10)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("engine", ["sockets", "tensorflow"])
def test_hosts_switch_together_and_worker_0_decides(engine, devices):
    """Two hosts add two numbers, their sums: not a bit depends on the buckets.

    By worker 0's clock the program's own sizes are slow, by worker 1's those of 64.
    """
    variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
    with Workers(2, PROGRAM, engine, "all", 600, variables=variables) as workers:
        outputs = workers.succeed()
    mine, theirs = said_by(outputs)
    assert mine["chosen"] == theirs["chosen"] in (64, 700)
    assert mine["same"] and theirs["same"]
    assert mine["lines"] == theirs["lines"]
    assert "tfdp: trial 1" in outputs[0] and "tfdp: trial 1" not in outputs[1]


@pytest.mark.slow
def test_a_worker_that_tunes_alone_is_told():
    with Workers(2, PROGRAM, "sockets", "1", 60) as workers:
        outputs = workers.outputs(600)
        codes = [process.returncode for process in workers.processes]
    assert 0 not in codes
    assert "(tuning) for the others: worker 0 did not arrive" in outputs[1]
    assert "for the others: worker 1 did not arrive" in outputs[0]
