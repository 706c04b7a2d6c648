"""What a host sends in a training step is what the formulas say."""

import pytest

from tests.support.workers import Workers

# Besides the weights: 24 bytes of header for each exchange, some of single numbers.
MOST_OTHER_BYTES = 400


@pytest.mark.worth_seconds(12)
@pytest.mark.parametrize(
    "shard, devices, ways", [("optimizer", 1, 2), ("parameters", 2, 3)]
)
def test_a_step_sends_what_the_formula_says(shard, devices, ways):
    """`ways` P (H - 1) / H bytes: each exchange sends the half that the other has."""
    variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
    arguments = ("tests.support.host_traffic", shard)
    with Workers(2, *arguments, variables=variables) as workers:
        outputs = workers.succeed()
    for output in outputs:
        (line,) = [line for line in output.splitlines() if line.startswith("sent ")]
        *steps, weight_bytes = map(int, line.split()[1:])
        for sent in steps:
            assert 0 < sent - ways * weight_bytes // 2 <= MOST_OTHER_BYTES
