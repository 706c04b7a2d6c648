"""Tables in parts over several hosts train as on one device."""

import pytest

from tests.support.workers import Workers


@pytest.mark.worth_seconds(60)
@pytest.mark.parametrize(
    "hosts, devices, forms",
    [
        (2, 1, ("adam",)),
        (2, 2, ("momentum", "tied")),
        (3, 1, ("positions",)),
    ],
)
def test_weights_are_those_of_one_device(hosts, devices, forms):
    """Also with replicas, and hosts, that have no row of a batch."""
    variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
    arguments = ("tests.support.host_tables", *forms)
    with Workers(hosts, *arguments, variables=variables) as workers:
        outputs = workers.succeed()
    for output in outputs:
        lines = [line for line in output.splitlines() if line.startswith("far ")]
        assert len(lines) == 2 * len(forms)
        for line in lines:
            # Float32 of weights below 1 after at most 8 steps, in other orders.
            assert max(map(float, line.split()[3:])) < 1e-5, line
