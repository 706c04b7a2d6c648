"""Programs that the generator runs on two hosts, and what it has found there."""

import dataclasses

import pytest

from tests.generator.hosts import HostsChild
from tests.generator.program import Branch, Data, Layout, Optimizer, Output, Program

PLAIN = Program(data=Data((8, 3)), calls=("train_on_batch", "predict"))
# Devices of each host, program. As it has made them smaller.
FOUND = {
    # The second host had no row to lend its replica: convolutions refuse none.
    "host-without-rows": (
        1,
        Program(branches=(Branch("image", ("conv-strided", "image-flatten")),)),
    ),
    # It built its model from a batch without rows.
    "built-without-rows": (
        1,
        Program(
            branches=(Branch("ragged-words", ("average",)),),
            trunk=("residual",),
            data=Data((1, 2), source="generator"),
        ),
    ),
    # All words of the row that it was lent were masked, and the mean over none of them
    # was no number.
    "ragged-host-without-rows": (
        1,
        Program(branches=(Branch("ragged-words", ("average",)),)),
    ),
    # One host knew its rows and the other one did not, and asked.
    "validation-on-uneven-hosts": (
        2,
        Program(
            branches=(Branch("masked-sequence", ("flatten",)),),
            outputs=(Output("SquaredHinge", metrics=("mse",)),),
            data=Data(source="dataset", validation_rows=9),
            calls=("fit-validate",),
        ),
    ),
    # The optimizer was built, and its state stored in shards, while a step was traced.
    "shards-made-in-a-trace": (
        2,
        Program(
            trunk=("dense-l2",),
            train_step="local_mean",
            optimizer=Optimizer("Adam"),
            layout=Layout(shard=3),
        ),
    ),
}
ONE_ROW = Data((1, 1))


@pytest.fixture(scope="module")
def children():
    made = {devices: HostsChild(devices) for devices in (1, 2)}
    yield made
    for child in made.values():
        child.close()


@pytest.mark.worth_seconds(60)
@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_mended(children, name):
    devices, program = FOUND[name]
    if devices == 1 and program.data == Data():
        program = dataclasses.replace(program, data=ONE_ROW)
    verdict = children[devices].judge(program)
    assert verdict.kind == "same", verdict.text


@pytest.mark.worth_seconds(20)
def test_sums_over_hosts_keep_their_order():
    """Of the number of samples nothing depends on a host that surely has none."""
    child = HostsChild(2, "a_slow_count")
    try:
        verdict = child.judge(Program(data=ONE_ROW, calls=("evaluate",)))
    finally:
        child.close()
    assert verdict.kind == "same", verdict.text


def test_a_refusal_on_both_hosts_is_one(children):
    """A step outside of graphs has the rows of one host."""
    verdict = children[1].judge(Program(eagerly=True, data=ONE_ROW))
    assert verdict.kind == "refused", verdict.text
    assert "a strategy of 2 hosts acts between replicas" in verdict.text


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("plant, kind", [(None, "same"), ("a_host_twice", "differs")])
def test_a_fault_on_one_host_is_found(devices, plant, kind):
    child = HostsChild(devices, plant)
    try:
        assert child.judge(PLAIN).kind == kind
    finally:
        child.close()
