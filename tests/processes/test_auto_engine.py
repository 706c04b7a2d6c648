"""`engine="auto"` between hosts that seem to have GPUs: collectives, or why not."""

import re

import pytest

from tests.support.workers import Workers

BY_NCCL = 'by NCCL, which engine="auto" takes .* was not run on a GPU'
CASES = {
    "all": ("tensorflow", BY_NCCL),
    "one without": ("sockets", "not by NCCL: on worker 1 it has no GPU"),
    "in use": ("sockets", "not by NCCL: on worker 1 TensorFlow was in use before"),
    "no server": ("sockets", "on worker 1 UnknownError: Could not start gRPC server"),
    "no library": ("sockets", "on worker 1 NotFoundError: libnccl.so.2"),
    "one GPU": ("sockets", "on worker 1 GPU-a is also worker 0's GPU, and NCCL"),
    "shards": ("sockets", "on worker 0 TensorFlow's collectives carry no shards"),
}


@pytest.mark.worth_seconds(16)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case == "all" else pytest.mark.slow)
        for case in CASES
    ],
)
def test_who_carries_the_gradients(case):
    engine, words = CASES[case]
    with Workers(
        2,
        "tests.support.auto_engine",
        case,
        variables={"TFDP_DEVICES_PER_WORKER": "2"},
    ) as workers:
        first, second = workers.succeed()
    for output in (first, second):
        assert f"engine {engine}\n" in output
    assert re.search(words, first), first
    # Once per job: what, on what, and why.
    assert first.count("tfdp: MultiHostDataParallelStrategy(4 replicas on 2 hosts") == 1
    assert "tfdp: Multi" not in second
