"""Two hosts whose gradients go as over NCCL, in several buckets, against one device."""

import re

import pytest

from tests.support.workers import Workers


@pytest.mark.worth_seconds(20)
@pytest.mark.parametrize(
    "wire_dtype", [[], pytest.param(["bfloat16"], marks=pytest.mark.slow)], ids=str
)
def test_buckets_in_one_order_train_as_one_device(wire_dtype):
    with Workers(
        2,
        "tests.support.nccl_hosts",
        *wire_dtype,
        variables={"TFDP_DEVICES_PER_WORKER": "2"},
    ) as workers:
        outputs = workers.succeed()
    for output in outputs:
        assert int(re.search(r"launches (\d+)", output)[1]) >= 4, output
        # Weights are below 1; each of 20 steps rounds its gradient and the weight by
        # some 6e-8 of them: below 20 * 2 * 6e-8 = 2.4e-6. bfloat16 is added as float32
        # here and rounds no more; sums made in it would be off by 2^-8 of a gradient,
        # 1e-3 of a weight.
        assert float(re.search(r"off by (\S+)", output)[1]) < 2.4e-6, output
