"""TensorFlow's server, which lets everybody in, is shut to all but the workers."""

import sys

import pytest

from tests.support.workers import Workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux")


@pytest.mark.worth_seconds(20)
@pytest.mark.parametrize(
    "mode",
    [
        "filter",
        pytest.param("none", marks=pytest.mark.slow),
        pytest.param("lies", marks=pytest.mark.slow),
    ],
)
def test_nobody_but_the_workers_reaches_the_server(mode):
    with Workers(2, "tests.support.collective_doors", mode) as workers:
        outputs = workers.succeed()
    is_closed = mode == "filter"
    for output in outputs:
        assert output.count("worker reaches True") == 2, output
        assert output.count(f"stranger reaches {not is_closed}") == 2, output
        assert f"closed {is_closed}" in output
        # Where it stays open, it is said: on every worker.
        assert ("can read and write files" in output) == (not is_closed), output
