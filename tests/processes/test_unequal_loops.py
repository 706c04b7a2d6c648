"""Workers that make other calls, or other numbers of steps, are told so at once."""

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
        ("delayed", 8),
        pytest.param("stale", 8, marks=pytest.mark.slow),
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


def soon(output, case):
    """The error of a case, which did not wait for the deadline of 600 seconds."""
    assert float(re.search(rf"{case}: took ([\d.]+) seconds", output).group(1)) < 300
    return re.search(rf"{case}: (\w*Error.*)", output).group(1)


@pytest.mark.worth_seconds(30)
def test_other_calls_are_said_at_once():
    outputs = run("evaluates after an epoch", "another fit")
    started = "CollectiveError Worker 0 started"
    for output in outputs:
        evaluated = soon(output, "evaluates after an epoch")
        assert evaluated.startswith(
            f"{started} evaluate (dataset 1) while worker 1 started epoch 3 of fit "
            "(dataset 0); every worker must call fit, evaluate and predict in the same "
        )
        assert soon(output, "another fit").startswith(
            f"{started} predict (dataset 2) while worker 1 started fit (dataset 1); "
        )


@pytest.mark.slow
def test_a_call_after_another_worker_has_ended_is_said_at_once():
    chief, other = run("ends")
    assert "ends: no error" in chief
    assert re.search(
        "Worker 0 has come to the end of its script while worker 1 started evaluate|"
        "worker 0 has come to the end of its script",
        soon(other, "ends"),
    )


@pytest.mark.slow
def test_a_call_within_an_epoch_is_said_at_once():
    for output in run("evaluates in an epoch"):
        assert "orker 0 started evaluate (dataset 1) while worker 1 was in epoch 1" in (
            soon(output, "evaluates in an epoch")
        )


@pytest.mark.slow
def test_ends_that_are_found_in_other_ways_are_alike():
    for output in run("alike"):
        assert "alike: no error" in output, output
