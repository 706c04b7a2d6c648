"""Hosts that drift apart after the first batch are told what differs, all of them."""

import re

import pytest

from tests.support.drifting_hosts import ALIKE, DIFFERENT
from tests.support.workers import Workers

# The others are of the tier `test-all`: each is a model of its own.
IN_TEST = {
    "weights between epochs",
    "learning rate in the last epoch",
    "loss scale",
    "seed of a generator between passes",
    "batches of the validation",
    "alike: own batches",
    "alike: read ahead, never trained on",
}
MARKS = {
    name: () if name in IN_TEST else pytest.mark.slow for name in (*DIFFERENT, *ALIKE)
}


def run(*arguments, devices=1):
    variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
    program = "tests.support.drifting_hosts"
    with Workers(2, program, *arguments, variables=variables) as workers:
        return workers.succeed()


@pytest.fixture(scope="module")
def outputs(request):
    """What each worker printed of the cases that run, in one launch."""
    rows = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.function in (test_a_difference_is_named, test_no_false_alarm)
    ]
    return run(*rows)


def said(output, name):
    return re.search(f"^{re.escape(name)}: (.*)$", output, re.M).group(1)


@pytest.mark.worth_seconds(100)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS[name]) for name in DIFFERENT]
)
def test_a_difference_is_named(outputs, name):
    for output in outputs:
        told = said(output, name)
        assert re.match("(ReplicaDriftError|CollectiveError) The workers", told), told
        assert re.search(DIFFERENT[name][1], told), told
        assert "worker 1 differs from worker 0" in told


@pytest.mark.worth_seconds(100)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS[name]) for name in ALIKE]
)
def test_no_false_alarm(outputs, name):
    assert [said(output, name) for output in outputs] == ["no error"] * 2


@pytest.mark.slow
def test_the_comparison_can_be_turned_off():
    for output in run("--off", "weights between epochs", "order of rows"):
        assert said(output, "weights between epochs") == "no error"
        assert said(output, "order of rows") == "no error"


@pytest.mark.slow
def test_shards_of_each_host():
    cases = ("optimizer state", "weights between epochs")
    for output in run("--shard", *cases, devices=2):
        assert "momentum" in said(output, "optimizer state")
        assert "kernel" in said(output, "weights between epochs")
