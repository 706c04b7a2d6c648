"""Two hosts that add several times in a step: no sum has parts of another."""

import pytest

from tests.support.runs_in_a_step import TURNS
from tests.support.workers import Workers


@pytest.mark.worth_seconds(35)
@pytest.mark.parametrize(
    "engine, devices", [("sockets", 2), ("sockets", 1), ("tensorflow", 2)]
)
def test_runs_of_one_step_do_not_meet_each_other(engine, devices):
    module = "tests.support.runs_in_a_step"
    variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
    with Workers(2, module, engine, variables=variables) as workers:
        outputs = workers.succeed()
    for output in outputs:
        for way in ("side by side", "called", "within"):
            assert f"{way}: 0 of {TURNS} wrong" in output, output
