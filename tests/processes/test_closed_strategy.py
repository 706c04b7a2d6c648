"""After `close()` a strategy of several hosts exchanges nothing, and says so."""

import pytest

from tests.support.workers import Workers


@pytest.mark.worth_seconds(20)
@pytest.mark.parametrize(
    "engine", ["sockets", pytest.param("tensorflow", marks=pytest.mark.slow)]
)
def test_a_closed_strategy_says_so_and_leaves_no_thread(engine):
    with Workers(2, "tests.support.closed_strategy", engine) as workers:
        outputs = workers.succeed()
    for output in outputs:
        lines = dict(
            line.split(": ", 1) for line in output.splitlines() if ": " in line
        )
        assert "\nend\n" in output
        assert lines["threads after close"] == "[]"
        for what in ("fit", "step", "barrier", "from_chief", "reduce"):
            assert "CollectiveError" in lines[what], lines[what]
            assert "close()` of the strategy" in lines[what], lines[what]
        if engine == "sockets":
            # What was made before a constructor raised does not live on.
            assert lines["construct"].startswith(
                "ConfigurationError: The workers were set up differently"
            )
            assert lines["threads after construct"] == "[]"
