"""Workers whose `fit` or `evaluate` makes another number of steps are told at once."""

import re

import pytest

from tests.support.workers import Workers


def run(*cases):
    with Workers(2, "tests.support.unequal_loops", *cases) as workers:
        return workers.succeed()


@pytest.mark.worth_seconds(30)
@pytest.mark.parametrize(
    "case, planned",
    [
        ("fit", 5),
        pytest.param("evaluate", 5, marks=pytest.mark.slow),
        pytest.param("a callback", 8, marks=pytest.mark.slow),
    ],
)
def test_both_numbers_are_said_at_once(case, planned):
    ended, waited = run(case)
    both = f"different numbers of steps .*: 2 on worker 0 and {planned} on worker 1"
    assert re.search(rf"{case}: CollectiveError The workers have {both}", ended), ended
    assert re.search(rf"{case}: .*WorkerLostError.*{both}", waited), waited
    for output in (ended, waited):
        took = float(re.search(rf"{case}: took ([\d.]+) seconds", output).group(1))
        # The deadline is 600 seconds, in which they waited for each other.
        assert took < 300, output


@pytest.mark.slow
def test_ends_that_are_found_in_other_ways_are_alike():
    for output in run("alike"):
        assert "alike: no error" in output, output
