"""Tables in parts over several hosts train as on one device."""

import pytest

from tests.support.workers import Workers


@pytest.mark.worth_seconds(40)
@pytest.mark.parametrize(
    "hosts, devices, forms",
    [
        (2, 1, ("momentum", "adam")),
        (2, 2, ("adamw", "tied")),
        (3, 1, ("positions", "twice")),
    ],
)
def test_weights_are_those_of_one_device(hosts, devices, forms):
    """Also with hosts that have no row of a batch, and in two lookups of one table."""
    variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
    arguments = ("tests.support.host_tables", *forms)
    with Workers(hosts, *arguments, variables=variables) as workers:
        outputs = workers.succeed()
    for output in outputs:
        lines = [line for line in output.splitlines() if line.startswith("far ")]
        assert len(lines) == 3 * len(forms)
        for line in lines:
            # Float32 of weights below 1 after at most 8 steps, in other orders.
            assert max(map(float, line.split()[3:])) < 1e-5, line
