"""Hosts that are late when the others have made their last step: all end alike."""

import pytest

from tests.support.hosts_at_the_end import EVERY, HOSTS, STEPS
from tests.support.workers import Workers

FEW, MANY = STEPS - 2 * EVERY, EVERY + 1  # rounds of which the means are kept, or not
PLANS = [
    (kind, late, after, min_hosts)
    for kind in ("quorum", "backup")
    for late in range(HOSTS)
    for after in (MANY, FEW, STEPS - 2)
    for min_hosts in (1, 2)
]
QUICK = [("quorum", 0, MANY, 2), ("backup", 2, MANY, 1)]


def run(folder, kind, late, after, how, min_hosts):
    """What the workers printed, and their final weights as hashes; all end well."""
    module = "tests.support.hosts_at_the_end"
    variables = {"TFDP_JOB_KEY": "a-key-of-this-test-only"}
    with Workers(
        *(HOSTS, module, folder, kind, late, after, how, min_hosts), variables=variables
    ) as workers:
        outputs = workers.succeed()
    return outputs, [(folder / f"weights.{r}").read_text() for r in range(HOSTS)]


@pytest.mark.worth_seconds(40)
@pytest.mark.parametrize(
    "plan",
    [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in PLANS],
    ids=lambda plan: "-".join(map(str, plan)),
)
def test_a_late_host_ends_with_the_weights_of_the_others(tmp_path, plan):
    """It sleeps from step `after` until the others have made their last step, and has
    the bits of the others in the end."""
    kind, late, after, min_hosts = plan
    outputs, weights = run(tmp_path, kind, late, after, "last", min_hosts)
    assert len(set(weights)) == 1, outputs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["quorum", "backup"])
@pytest.mark.parametrize("late", range(HOSTS))
def test_a_host_that_comes_when_all_others_have_ended_goes_on_alone(
    tmp_path, kind, late
):
    """The others wait for it for `timeout_seconds` only."""
    outputs, weights = run(tmp_path, kind, late, MANY, "ended", 1)
    others = [weights[rank] for rank in range(HOSTS) if rank != late]
    assert len(set(others)) == 1, outputs
