"""`callbacks.Stragglers` on two workers, the input of one of which sleeps.

What is compared is relative: the machine may be busy, and then both workers wait.
"""

import json

import pytest

from tests.support.straggler_workers import SLEEPS_SECONDS
from tests.support.workers import Workers
from tfdp.tools.commands.cli import main

PROGRAM = "tests.support.straggler_workers"


@pytest.mark.worth_seconds(40)
def test_the_slow_worker_is_named_and_training_stays_the_same(tmp_path, capsys):
    slow = 1
    with Workers(2, PROGRAM, slow, tmp_path / "run") as workers:
        outputs = workers.succeed()
    told = [
        json.loads(line.removeprefix("told "))
        for output in outputs
        for line in output.splitlines()
        if line.startswith("told ")
    ]
    assert len(told) == 2
    for one in told:
        assert one["imported"] == []  # without the callback
        # Two addends have one sum, wherever in a bucket they are: the same bits.
        assert one["same"] and one["same_accumulated"]
        assert [slow, "input"] in [found[:2] for found in one["found"]]
        # In an execution of several steps Keras takes a batch before a step begins.
        assert slow in [found[0] for found in one["accumulated"]]
        assert set(one["logs"]["straggler_worker"]) == {slow}
        # Half of a step at least is this sleep, in two steps of three.
        assert max(one["lost_seconds"]) > SLEEPS_SECONDS / 2
        assert min(one["logs"]["straggler_lost_share"]) > 0.1
        assert min(one["logs"]["straggler_to_best"]) > 1
    # All workers read the same table.
    assert told[0] == told[1]
    lines = [line for line in outputs[0].splitlines() if "is slow, mostly" in line]
    assert any(f"worker {slow} is slow, mostly in its input" in one for one in lines)
    assert "is slow, mostly" not in outputs[1]
    assert main(["report", str(tmp_path / "run")]) == 0
    assert f"worker {slow} is slow, mostly in its input" in capsys.readouterr().out
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert "While it trained:" in page
