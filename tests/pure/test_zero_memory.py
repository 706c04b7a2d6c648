"""The memory of states by formula, beside the table of the paper that it is from."""

import pytest

from tests.support.package_source import REPOSITORY
from tfdp.errors import ConfigurationError
from tfdp.plan.zero_memory import KERAS_ADAM, MIXED_ADAM, PUBLISHED, state_bytes

PAGE = REPOSITORY.joinpath("docs", "planning.md").read_text("utf-8")


@pytest.mark.parametrize("point", PUBLISHED, ids=str)
def test_a_figure_of_the_paper(point):
    found = state_bytes(*point, MIXED_ADAM) / 1e9
    # The paper prints three digits, of the last ones some cut off and not rounded.
    assert found == pytest.approx(PUBLISHED[point], rel=0.03)


@pytest.mark.parametrize("stage", range(4))
def test_both_kinds_of_adam_take_16_bytes_and_differ_in_what_is_cut(stage):
    mixed, own = (state_bytes(1e9, stage, 1024, of) for of in (MIXED_ADAM, KERAS_ADAM))
    assert state_bytes(1e9, stage, 1, MIXED_ADAM) == 16e9
    assert state_bytes(1e9, stage, 1, KERAS_ADAM) == 16e9
    # What is left whole: 2 + 2 bytes against 4 + 4, 2 against 4, nothing.
    expected = {0: (16, 16), 1: (4, 8), 2: (2, 4), 3: (0, 0)}[stage]
    assert (round(mixed / 1e9), round(own / 1e9)) == expected


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "parameters"])
def test_the_page_has_figure_1(shard):
    sizes = [state_bytes(7.5e9, shard, 64, of) / 1e9 for of in (MIXED_ADAM, KERAS_ADAM)]
    published = PUBLISHED[7.5e9, shard, 64]
    row = f"| {shard} | {published:g} | {sizes[0]:.1f} | {sizes[1]:.1f} |"
    assert row in PAGE


@pytest.mark.parametrize(
    "arguments", [(0, 1, 1), (float("nan"), 1, 1), ("7B", 1, 1), (1e9, 4, 1)]
)
def test_what_means_nothing_is_refused(arguments):
    with pytest.raises(ConfigurationError, match="must be"):
        state_bytes(*arguments)


def test_a_number_of_replicas_that_means_nothing_is_refused():
    with pytest.raises(ConfigurationError, match="replicas must be"):
        state_bytes(1e9, 1, 0)
